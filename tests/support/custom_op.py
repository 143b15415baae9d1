"""Builds a copy of ``examples/custom_op`` and runs it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import liteboost_adaptor
from liteboost_adaptor import config, native_build

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "custom_op"


def build(folder: Path, *targets: str, options: tuple[str, ...] = ()) -> Path:
    """A copy of the example in ``folder``, compiled as its README says; only ``targets`` if given.

    Args:
        options: For CMake's first step.
    """
    if not (native_build.find_program("cmake") and native_build.find_program("ninja")):
        pytest.skip("needs CMake and ninja")
    example = folder / "custom op"
    shutil.copytree(EXAMPLE, example, ignore=shutil.ignore_patterns("build", "__pycache__"))
    _configure_and_build(example, targets, options)
    return example


def rebuild(example: Path) -> None:
    """Compile a copy of an example that was built elsewhere and then changed."""
    shutil.rmtree(example / "build", ignore_errors=True)
    _configure_and_build(example, ())


def _configure_and_build(example: Path, targets: tuple[str, ...], options: tuple[str, ...] = ()) -> None:
    cmake, ninja = (native_build.find_program(name) for name in ("cmake", "ninja"))
    _run(
        *(cmake, "-S", example, "-B", example / "build", "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"),
        f"-DPython_EXECUTABLE={sys.executable}",
        *options,
    )
    wanted = ["--target", *targets] if targets else []
    _run(cmake, "--build", example / "build", *wanted)


def status(example: Path, *arguments: str, program: str = "run.py", **environment: str) -> tuple[dict, str]:
    """Run the example's program under ``status``; return the row of its rule, and what was printed."""
    rules = {"LITEBOOST_PATCH_PATH": str(example / "rule.toml"), **environment}
    command = [sys.executable, "-m", "liteboost_adaptor", "status", "--all"]
    command += ["--json-file", example / "status.json"]
    printed = _run(*command, example / program, *arguments, **rules)
    rows = json.loads((example / "status.json").read_text())["rules"]
    (row,) = [row for row in rows if row["id"] == "example.mix"]
    return row, printed


def _run(*command: object, **environment: str) -> str:
    path = str(Path(liteboost_adaptor.__file__).parents[1])
    done = subprocess.run(
        [str(part) for part in command],
        env=config.child_environment(PYTHONPATH=path, **environment),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
