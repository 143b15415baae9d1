"""Other torches than the tested one: the kernels compile for them, run on them, are told apart by name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cuda_stubs import add_stubs
from sandbox import NO_COMPILER, ROOT, TORCH, Sandbox, copy_sources

pytestmark = pytest.mark.full

Make = Callable[..., Sandbox]

#: The release before the tested one, and the oldest we accept, whose wheel has the other C++ ABI. Each has a
#: torch_npu release of its own.
OTHERS = ("2.12.0", "2.6.0")


@pytest.fixture(scope="module", params=OTHERS)
def other_torch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with another torch from PyPI, without its CUDA packages (530 to 770 MB are fetched)."""
    folder = tmp_path_factory.mktemp("torch")
    wanted = f"torch=={request.param}"
    command = ["-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), wanted]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"{wanted} cannot be fetched: {done.stderr.strip()}")
    if not all(shutil.which(tool) for tool in ("gcc", "readelf", "nm")):
        pytest.skip("needs gcc and binutils")
    (wheel,) = folder.glob("torch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    wheel.unlink()
    add_stubs(folder / "site")
    yield folder / "site"
    shutil.rmtree(folder)  # gigabytes, which pytest would keep for three runs


@pytest.fixture(scope="module")
def box(other_torch: Path, tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
    """A sandbox with that torch and the package compiled for it."""
    base = tmp_path_factory.mktemp("other")
    box = Sandbox(base / "box", (*TORCH, "torch_npu"))
    (box.site_packages / "torch.pth").write_text(f"{other_torch}\n")
    done = box.pip_install(copy_sources(base / "clone"), LITEBOOST_REQUIRE_NATIVE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return box


def test_kernels_are_built_for_it_and_run(box: Sandbox, request: pytest.FixtureRequest) -> None:
    look = box.look()
    assert look["loaded"] and look["value"] == 3.0, look["reason"]
    assert look["build_info"]["torch"].partition("+")[0] in OTHERS
    assert f"[{look['build_info']['torch'].partition('+')[0]}]" in request.node.name


def test_a_script_gives_one_text_at_both_levels(box: Sandbox) -> None:
    script = ROOT / "examples" / "generate.py"
    texts = {
        level: box.run(script, "--new-tokens", 20, LITEBOOST_LEVEL=level, HF_HUB_OFFLINE="1")
        for level in ("0", "1")
    }
    assert texts["1"].returncode == 0, texts["1"].stderr
    assert texts["1"].stdout and texts["0"].stdout == texts["1"].stdout


def test_op_tests_pass_on_it(box: Sandbox) -> None:
    done = subprocess.run(
        [str(box.python), "-m", "pytest", "-p", "no:cacheprovider", str(ROOT / "tests" / "ops")],
        # From the installed package, not from the checkout: safe path keeps the folder of the tests out.
        cwd=box.folder,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "liteboost_adaptor: native kernels, instruction sets" in done.stdout


def test_a_library_built_for_the_tested_torch_is_refused_by_name(
    box: Sandbox, other_torch: Path, sandbox: Make, sources: Path
) -> None:
    ours = sandbox(*TORCH, "torch_npu", name="swap")
    (ours.site_packages / "torch.pth").write_text(f"{other_torch}\n")
    assert ours.pip_install(sources, **NO_COMPILER).returncode == 0
    package = ours.site_packages / "liteboost_adaptor"
    built = box.site_packages / "liteboost_adaptor"
    for name in ("_C.so", "_build_info.json"):
        shutil.copy(built / name, package)
    assert ours.look()["loaded"]
    (ours.site_packages / "torch.pth").unlink()
    ours.show(*TORCH)
    look = ours.look()
    found = json.loads((package / "_build_info.json").read_text())["torch"]
    assert not look["loaded"] and look["value"] == 3.0
    assert f"was built for torch {found}, found {torch.__version__}" in look["reason"]
    (sentence,) = look["warnings"]
    assert "python -m liteboost_adaptor build" in sentence
