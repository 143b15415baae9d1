"""The files of the set-up agree with each other: pyproject.toml, constraints.txt, Makefile, .ci/run."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from sandbox import ROOT, copy_sources

import liteboost_adaptor
from liteboost_adaptor.environment import diagnosis

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def dependencies() -> dict[str, Requirement]:
    return {each.name: each for each in map(Requirement, PROJECT["project"]["dependencies"])}


def constraints() -> dict[str, Requirement]:
    lines = [
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1] not in ("", "#")
    ]
    return {each.name: each for each in map(Requirement, lines)}


def test_one_version() -> None:
    assert PROJECT["project"]["version"] == liteboost_adaptor.__version__


def test_licence_is_named_and_there() -> None:
    assert PROJECT["project"]["license"] == "Apache-2.0"
    (file,) = PROJECT["project"]["license-files"]
    assert "Apache License" in (ROOT / file).read_text()


def test_torch_npu_is_an_extra_and_torch_no_build_requirement() -> None:
    assert not {"torch_npu", "torch-npu"} & dependencies().keys()
    (npu,) = map(Requirement, PROJECT["project"]["optional-dependencies"]["npu"])
    assert npu.name == "torch_npu"
    served = ("2.9.0", "2.9.0.post2", "2.9.1", "2.10.0", "2.11.0", "2.12.0", "2.13.0", "2.14.0")
    assert list(npu.specifier.filter([*served, "2.8.0.post2", "2.15.0"])) == list(served)
    assert not any(Requirement(each).name == "torch" for each in PROJECT["build-system"]["requires"])


def test_everything_named_is_pinned_and_every_pin_is_allowed() -> None:
    extras = PROJECT["project"]["optional-dependencies"].values()
    named = [*dependencies().values(), *(Requirement(each) for extra in extras for each in extra)]
    pins = constraints()
    for requirement in named:
        (pin,) = pins[requirement.name].specifier
        assert pin.operator == "=="
        assert requirement.specifier.contains(pin.version), (
            f"{requirement} excludes what is tested: {pin.version}"
        )


def test_doctor_knows_the_same_floors() -> None:
    for name, floor in diagnosis.FLOORS.items():
        (specifier,) = dependencies()[name].specifier
        assert specifier.operator == ">=" and Version(specifier.version) == Version(floor)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = copy_sources(tmp_path / "a clone")
    for name in ("Makefile", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    return folder


def make(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("make") is None:
        pytest.skip("needs make")
    # MAKEFLAGS: this test may itself run under make.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", *arguments], cwd=clone, env=clean, capture_output=True, text=True, check=False
    )


def test_set_up_is_done_once_and_again_after_a_change(clone: Path) -> None:
    assert make(clone, "--question", "setup").returncode == 1
    recipe = make(clone, "--dry-run", "setup").stdout
    (ready,) = {word for word in recipe.split() if word.startswith(".venv/ready-") and "*" not in word}
    (clone / ".venv").mkdir()
    (clone / ready).touch()
    assert make(clone, "--question", "setup").returncode == 0
    with (clone / "kernels" / "library.cpp").open("a") as file:
        file.write("// changed\n")
    assert make(clone, "--question", "setup").returncode == 1


def test_the_demo_sets_up_what_it_needs_and_nothing_where_all_is_there(clone: Path) -> None:
    recipe = make(clone, "--dry-run", "demo").stdout
    assert "--editable ." in recipe and "[test" not in recipe and "CXX_TESTS" not in recipe
    (own,) = {word for word in recipe.split() if word.startswith(".venv/demo-") and "*" not in word}
    (whole,) = {
        word
        for word in make(clone, "--dry-run", "setup").stdout.split()
        if word.startswith(".venv/ready-") and "*" not in word
    }
    for ready in (own, whole):
        (clone / ".venv").mkdir(exist_ok=True)
        (clone / ready).touch()
        assert "pip install" not in make(clone, "--dry-run", "demo").stdout
        (clone / ready).unlink()


def test_a_build_for_one_cpu_is_not_remembered() -> None:
    """CMake keeps what it was told last in a folder that the next install uses, too: one for all CPUs."""
    assert PROJECT["tool"]["scikit-build"]["cmake"]["define"] == {"LITEBOOST_ISAS": "all"}


def test_the_demo_of_a_wheel_compiles_nothing(clone: Path) -> None:
    assert "LITEBOOST_ISAS=native" in make(clone, "--dry-run", "demo").stdout
    wheel = clone / "a wheel.whl"
    wheel.write_bytes(b"one")
    recipe = make(clone, "--dry-run", "demo", f"WHEEL={wheel}").stdout
    (install,) = [line for line in recipe.splitlines() if "pip install" in line]
    assert str(wheel) in install and "--constraint constraints.txt" in install and "--editable" not in recipe
    assert ".venv/" not in recipe and "cmake" not in recipe
    (ready,) = {word for word in recipe.split() if word.startswith(".venv-demo/ready-")}
    (clone / ".venv-demo").mkdir()
    (clone / ready).touch()
    assert "pip install" not in make(clone, "--dry-run", "demo", f"WHEEL={wheel}").stdout
    wheel.write_bytes(b"another")
    assert "pip install" in make(clone, "--dry-run", "demo", f"WHEEL={wheel}").stdout
    refused = make(clone, "demo", "WHEEL=absent.whl")
    assert refused.returncode != 0 and "WHEEL names no file: absent.whl" in refused.stderr


@pytest.mark.parametrize("target", ["setup", "demo"])
def test_set_up_never_lets_pip_choose_a_torch(target: str, clone: Path) -> None:
    recipe = make(clone, "--dry-run", target).stdout
    installs = [line for line in recipe.splitlines() if "pip install" in line]
    assert len(installs) == 2
    assert all("--constraint constraints.txt" in line for line in installs)
    assert "torch==2.13.0" in (clone / "constraints.txt").read_text().splitlines()


@pytest.mark.parametrize(
    ("lint", "tests", "status"), [(0, 0, 0), (0, 2, 2), (2, 0, 2)], ids=["passes", "test fails", "lint fails"]
)
def test_ci_ends_with_the_closing_line_and_the_status(
    lint: int, tests: int, status: int, tmp_path: Path
) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    programs = tmp_path / "programs"
    programs.mkdir()
    closing = "====== 3 failed, 12 passed, 1 skipped in 61.20s (0:01:01) ======"
    (programs / "make").write_text(
        f'#!/bin/sh\nif [ "$1" = lint ]; then exit {lint}; fi\n'
        f'echo "{closing}"\necho "make: *** [test] Error"\nexit {tests}\n'
    )
    (programs / "make").chmod(0o755)
    # id says that we are not root, so that nothing is installed.
    (programs / "id").write_text("#!/bin/sh\necho 1000\n")
    (programs / "id").chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [str(tmp_path / ".ci" / "run")],
        env={**os.environ, "PATH": path, "CI": "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status
    assert done.stdout.splitlines()[-1] == closing
