"""Builds of the kernels for tests that look at objects, or run the programs in ``tests/csrc``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def find(*names: str, why: str) -> str:
    """The path of the first program of ``names`` there is; without one the test is skipped, with ``why``."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for name in names:
        if found := shutil.which(name, path=path):
            return found
    pytest.skip(f"{' or '.join(names)} not found: {why}")


def configure(folder: Path, *options: str, sources: Path = ROOT / "kernels") -> Path:
    """Configure ``sources`` with the test programs, warnings being errors, in ``folder``; returns it."""
    cmake = find("cmake", why="builds the kernels for this test")
    ninja = shutil.which("ninja")
    generator = ["-G", "Ninja"] if ninja else ["-G", "Unix Makefiles"]
    command = [cmake, "-S", str(sources), "-B", str(folder), *generator]
    command += [f"-DPython_EXECUTABLE={sys.executable}", "-DLITEBOOST_WERROR=ON", "-DLITEBOOST_CXX_TESTS=ON"]
    run([*command, *options])
    return folder


def compiled() -> Path | None:
    """The folder where `make setup` has compiled the kernels as they are now, with the test programs."""
    sources = [path for part in ("kernels", "tests/csrc") for path in (ROOT / part).rglob("*.*")]
    # Written behind every set-up; what is compiled may be older, where its own sources are.
    done = max((path.stat().st_mtime for path in ROOT.glob(".venv/ready-*")), default=0.0)
    if done <= max(path.stat().st_mtime for path in sources):
        return None
    for folder in ROOT.glob("build/editable-*/kernels"):
        programs = [f"csrc/{name}_{isa}" for isa in built_isas(folder) for name in ("vec_test", "loops_test")]
        if all((folder / program).exists() for program in programs):
            return folder
    return None


def build(folder: Path, *targets: str) -> None:
    """Build ``targets`` in the configured ``folder``, on all cores."""
    cmake = find("cmake", why="builds the kernels for this test")
    run([cmake, "--build", str(folder), "--parallel", str(os.cpu_count() or 1), "--target", *targets])


def built_isas(folder: Path) -> list[str]:
    """The instruction sets that the build in ``folder`` compiles."""
    return json.loads((folder / "_build_info.json").read_text())["isas"]


def run(command: list[str]) -> str:
    """The output of ``command``; fails the test with it when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{output[-6000:]}"
    return output
