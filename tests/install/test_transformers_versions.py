"""The supported range of transformers: releases are audited, installed and run with every family."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from sandbox import ROOT, Sandbox, copy_sources

from liteboost_adaptor.audit import packages
from liteboost_adaptor.environment.diagnosis import FLOORS
from liteboost_adaptor.errors import AuditError

pytestmark = pytest.mark.full

#: No tiny model in any of these: they need a package or a device that is not here, or more than sizes.
_NEVER = {"gemma3n", "musicgen", "musicgen_melody"}
_BEFORE_5_16 = {*_NEVER, "dbrx", "granitemoehybrid", "zamba"}
_BEFORE_5_4 = {*_BEFORE_5_16, "emu3", "jamba", "llama4", "modernbert-decoder", "phi4_multimodal", "xlstm"}
#: Release -> families that have no tiny model there.
VERSIONS: dict[str, set[str]] = {
    "4.57.6": {*_BEFORE_5_4, "mllama", "qdqbert", "speech_to_text_2", "stablelm", "transfo-xl"},
    "5.0.0": _BEFORE_5_4,
    "5.10.4": {*_BEFORE_5_16, "gemma4_assistant", "gemma4_unified_assistant"},
    "5.16.1": _NEVER,
    # Its configuration of Gemma 4 refuses what has no layer with keys of its own, as a draft head has none.
    "5.23.0": {"gemma3n", "gemma4_assistant", "gemma4_unified_assistant"},
    "5.24.0": {"gemma3n"},
}

#: Tests of tests/models/test_families.py that do not hold there. Gemma 2 is run by sdpa without a softcap,
#: and we fall back there. Before the experts interface GPT-OSS has no method for its gate.
_SOFTCAP = (
    "test_fp32_greedy_tokens_and_their_logits_are_the_originals and gemma2",
    "test_every_call_goes_through_our_ops and gemma2",
    "test_fp16_is_as_near_to_float64_as_the_original and gemma2",
)
NOT_THERE: dict[str, tuple[str, ...]] = {
    "4.57.6": (*_SOFTCAP, "test_every_call_goes_through_our_ops and gpt_oss"),
    "5.0.0": _SOFTCAP,
    "5.10.4": _SOFTCAP,
    "5.16.1": _SOFTCAP,
    "5.23.0": (),
    "5.24.0": (),
}
FAMILY_TESTS = 70


@pytest.fixture(scope="module", params=VERSIONS)
def release(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[packages.Place]:
    """A folder with one release and what it needs."""
    try:
        with packages.fetched(request.param, None) as place:
            yield place
    except AuditError as fault:
        pytest.skip(f"transformers {request.param} cannot be fetched: {fault}")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with its kernels, built once."""
    base = tmp_path_factory.mktemp("wheel")
    sources = copy_sources(base / "clone")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(base), str(sources)],
        env={**os.environ, "LITEBOOST_REQUIRE_NATIVE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = base.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def box(release: packages.Place, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
    """A sandbox with that release, in place of everything of this environment it brings itself, and us."""
    names = {entry.name.split("-")[0].lower() for entry in release.folder.iterdir()}
    box = Sandbox(tmp_path_factory.mktemp("range") / "box", tuple(names))
    (box.site_packages / "release.pth").write_text(f"{release.folder}\n")
    done = box.pip_install(wheel)
    assert done.returncode == 0, done.stdout + done.stderr
    return box


def test_the_range_is_what_is_tested() -> None:
    oldest = min(VERSIONS, key=lambda version: [int(part) for part in version.split(".")])
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (stated,) = re.findall(r'"(transformers>=[\d.]+)"', project)
    assert stated == f"transformers>={FLOORS['transformers']}"
    assert oldest in Requirement(stated).specifier
    assert oldest.startswith(FLOORS["transformers"])


def test_nothing_is_new_in_it(release: packages.Place) -> None:
    command = [sys.executable, "-m", "liteboost_adaptor", "audit", "--path", str(release.folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    (found,) = json.loads(done.stdout)["versions"]
    assert found["version"] == release.name
    assert found["differences"] == []
    assert found["states"]["listed"] > 150 and found["states"]["proved"] == 0
    assert done.returncode == 0


def test_doctor_is_content_with_it(box: Sandbox, release: packages.Place) -> None:
    diagnosis = json.loads(box.run("-m", "liteboost_adaptor", "doctor", "--json").stdout)
    assert diagnosis["usable"] and diagnosis["native"]["backend"] == "native"
    assert diagnosis["versions"]["transformers"] == release.name


def test_every_family_gives_the_originals_logits_and_tokens(box: Sandbox, release: packages.Place) -> None:
    done = box.run(
        "-m", "support.version_smoke", PYTHONPATH=str(ROOT / "tests"), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1"
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["version"] == release.name
    assert Path(found["package"]).is_relative_to(box.folder)
    assert found["wrong"] == {} and found["failed"] == []
    assert set(found["not_run"]) == VERSIONS[release.name], found["not_run"]
    for kind, share in SERVED.items():
        assert len(found["served"][kind]) >= share * found["run"], (kind, found["served"][kind])


def test_the_example_writes_the_originals_text_on_it(box: Sandbox, release: packages.Place) -> None:
    example = [str(ROOT / "examples" / "generate.py"), "--new-tokens", "40"]
    texts = [
        box.run(*example, HF_HUB_OFFLINE="1", LITEBOOST_LEVEL=level, OMP_NUM_THREADS="1") for level in "02"
    ]
    assert all(done.returncode == 0 for done in texts), [done.stderr[-2000:] for done in texts]
    assert texts[0].stdout == texts[1].stdout and texts[0].stdout.startswith("ROMEO:")


#: Kind -> least share of the families whose calls of the kind we serve. Half have gated products.
SERVED = {"norm": 0.5, "rope": 0.5, "attention": 0.5, "linear": 0.9, "activation": 0.4}


def test_the_tests_of_families_pass_on_it(box: Sandbox, release: packages.Place) -> None:
    excluded = NOT_THERE[release.name]
    chosen = ["-k", " and ".join(f"not ({test})" for test in excluded)] if excluded else []
    file = ROOT / "tests" / "models" / "test_families.py"
    done = subprocess.run(
        [str(box.python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, str(file)],
        cwd=box.folder,
        env={**os.environ, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    (passed,) = re.findall(r"^(\d+) passed", done.stdout, re.MULTILINE)
    assert int(passed) == FAMILY_TESTS - len(excluded)
