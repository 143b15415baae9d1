"""An environment of another Python and another torch, into which a wheel is installed as a user would."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from cuda_stubs import add_stubs

ROOT = Path(__file__).resolve().parents[2]
#: Of this environment, what others do without: the one installed into has no build tools.
_NOT_NEEDED = (
    "torch",
    "torch_npu",
    "liteboost_adaptor",
    "pip",
    "cmake",
    "ninja",
    "scikit_build_core",
    "ruff",
    "mypy",
)


@dataclass(frozen=True)
class Environment:
    """A virtual environment in ``folder``."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    def run(self, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run its Python from its own folder: no compiler on the PATH, nothing of the checkout imported."""
        variables = {"PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1", **variables}
        clean = {name: value for name, value in os.environ.items() if not name.startswith("LITEBOOST_")}
        clean.pop("PYTHONPATH", None)
        clean |= {"PATH": str(self.folder / "bin"), "CXX": "/nonexistent/c++", **variables}
        command = [str(self.python), *map(str, arguments)]
        return subprocess.run(
            command, cwd=self.folder, env=clean, capture_output=True, text=True, check=False
        )


def made(folder: Path, interpreter: str, torch: str) -> Environment:
    """A new environment with that torch and, in the versions of this environment, all else that tests need.

    torch comes without what it depends on for other devices; a CUDA build gets stand-ins (`cuda_stubs`).

    Raises:
        subprocess.CalledProcessError: Something of it cannot be installed; the output was printed.
    """
    subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    made = Environment(folder)
    freeze = [sys.executable, "-m", "pip", "freeze", "--exclude-editable"]
    names = subprocess.run(freeze, capture_output=True, text=True, check=True).stdout.splitlines()
    wanted = [name for name in names if "==" in name and name.partition("==")[0].lower() not in _NOT_NEEDED]
    install = [made.python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-cache-dir", "--no-compile"]
    subprocess.run([*map(str, install), *wanted, "setuptools"], check=True)
    subprocess.run([*map(str, install), f"torch=={torch}"], check=True)
    add_stubs(made.site_packages)
    return made


def installed(environment: Environment, wheel: Path) -> float:
    """Install the wheel without a network, and without compiling; the seconds of a processor that it took."""
    how = ["--quiet", "--no-deps", "--no-index", "--force-reinstall"]
    begun = os.times()
    done = environment.run("-m", "pip", "install", *how, wheel)
    ended = os.times()
    if done.returncode != 0:
        raise RuntimeError(f"{wheel} cannot be installed: {done.stderr}")
    return ended.children_user - begun.children_user + ended.children_system - begun.children_system


def interpreter(version: str) -> str | None:
    """A Python ``version`` (as ``3.12``) on this machine, or None: on the PATH, or one that pyenv has."""
    if found := shutil.which(f"python{version}"):
        if subprocess.run([found, "-c", ""], check=False, capture_output=True).returncode == 0:
            return found
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    return next((str(path) for path in sorted(pyenv.glob(f"{version}.*/bin/python"))), None)
