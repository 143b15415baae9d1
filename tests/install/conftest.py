"""Fixtures of the installation tests: a copy of the sources, sandboxes, wheels for isolated builds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sandbox import Sandbox, copy_sources


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """The sources of a clone, in a folder with a space in its name."""
    return copy_sources(tmp_path / "a clone")


@pytest.fixture
def sandbox(tmp_path: Path) -> Callable[..., Sandbox]:
    """Makes a `Sandbox`; arguments are the names of packages it shall not see."""

    def make(*without: str, name: str = "sand box") -> Sandbox:
        return Sandbox(tmp_path / name, without)

    return make


@pytest.fixture(scope="session")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an isolated build may install: the build requirements, and no torch."""
    folder = tmp_path_factory.mktemp("wheelhouse")
    wanted = ["scikit-build-core>=1.0", "cmake>=3.18", "ninja>=1.5"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), *wanted],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(
            f"an isolated build needs {', '.join(wanted)} from a package index: {done.stderr.strip()}"
        )
    return folder
