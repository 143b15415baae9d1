"""Environments to install into: a venv that sees chosen packages of this one, and a copy of the sources."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "CMakeLists.txt",
    "LICENSE",
    "README.md",
    "pyproject.toml",
    "build_support",
    "kernels",
    "liteboost_adaptor",
    "patches",
)
TORCH = ("torch", "torchgen", "functorch")
BUILD_TOOLS = ("cmake", "ninja")

#: No compiler: CMake takes CXX at its word and fails. Removing compilers from the PATH is not enough, as it
#: also looks into the system's folders.
NO_COMPILER = {"CXX": "/nonexistent/c++"}

# What a user of the installed package sees, from a folder that is not the checkout.
LOOK = """
import json, sys, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from importlib.resources import files
    import liteboost_adaptor
    from liteboost_adaptor import native
    status = native.load()
import torch
value = torch.ops.liteboost.rms_norm(torch.ones(2, 8), torch.full((8,), 3.0), 1e-6).mean().item()
package = files("liteboost_adaptor")
model = torch.nn.Sequential(torch.nn.LayerNorm(8))
liteboost_adaptor.apply(model)
print(json.dumps({
    **status.to_dict(),
    "package": liteboost_adaptor.__file__,
    "warnings": [str(w.message) for w in caught if "liteboost" in str(w.message)],
    "value": round(value, 4),
    "bound": sum("__liteboost__" in vars(type(module)) for module in model.modules()),
    "rules": sorted(p.name for p in (package / "patches").iterdir()),
    "kernels": (package / "kernels" / "CMakeLists.txt").is_file(),
    "typed": (package / "py.typed").is_file(),
}))
"""


@functools.cache
def _empty_venv() -> Path:
    """To be copied, which takes a tenth of the time that it takes to make one: a venv may be moved."""
    folder = Path(tempfile.mkdtemp(prefix="liteboost-venv-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    return folder / "venv"


@dataclass
class Sandbox:
    """A venv in ``folder`` whose Python sees this environment's packages, except ``without`` and us."""

    folder: Path
    without: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        shutil.copytree(_empty_venv(), self.folder / "venv", symlinks=True)
        self._seen = self.folder / "seen"
        self._seen.mkdir()
        for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
            for entry in Path(place).iterdir():
                self._show(entry)
        # Not links in the venv itself: pip would take them for its own and remove what they lead to.
        (self.site_packages / "seen.pth").write_text(f"{self._seen}\n")

    def _show(self, entry: Path) -> None:
        name = entry.name.split("-")[0].lower()
        hidden = ("liteboost_adaptor", "pip", "setuptools", "__pycache__", *self.without)
        link = self._seen / entry.name
        ours = entry.name.startswith(("_liteboost", "__editable__"))
        if name not in hidden and not ours and not link.exists():
            link.symlink_to(entry)

    def show(self, *names: str) -> None:
        """Let it see packages that were left out: what installing them later does."""
        self.without = tuple(name for name in self.without if name not in names)
        for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
            for entry in Path(place).iterdir():
                self._show(entry)

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        (found,) = (self.folder / "venv" / "lib").glob("python*/site-packages")
        return found

    def run(self, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run its Python in an empty folder."""
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("LITEBOOST_")}
        clean.pop("PYTHONPATH", None)
        return subprocess.run(
            [str(self.python), *map(str, arguments)],
            cwd=home,
            env={**clean, "XDG_CACHE_HOME": str(self.folder / "cache"), **self.environment, **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=1800,
        )

    def pip_install(
        self, *arguments: object, isolated: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """``pip install`` without its dependencies and without a network.

        Args:
            arguments: What to install.
            isolated: Build in an environment of its own, made from the wheels in this folder.
        """
        how = ["--find-links", isolated] if isolated else ["--no-build-isolation"]
        quiet = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_CONSTRAINT": ""}
        return self.run(
            *("-m", "pip", "install", "--no-deps", "--no-index", "--verbose", *how, *arguments),
            **{**quiet, **environment},
        )

    def look(self, **environment: str) -> dict[str, object]:
        """What the installed package says of itself, see `LOOK`."""
        done = self.run("-c", LOOK, **environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def copy_sources(destination: Path) -> Path:
    """The sources a clone has, without anything built."""
    destination.mkdir(parents=True)
    built = shutil.ignore_patterns("*.so", "_build_info*.json", "_rules.json", "_native", "__pycache__")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, destination / name, ignore=built)
        else:
            shutil.copy(source, destination / name)
    return destination


def make_sdist(sources: Path) -> Path:
    """The source distribution of a copy of the sources."""
    code = (
        "import sys; sys.path.insert(0, 'build_support'); import liteboost_backend as backend; "
        "backend.build_sdist('dist')"
    )
    subprocess.run([sys.executable, "-c", code], cwd=sources, check=True, capture_output=True)
    (sdist,) = (sources / "dist").glob("*.tar.gz")
    return sdist
