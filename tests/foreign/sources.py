"""Where the tests come from: source distributions of the installed versions, and a checkout if there is one.

Everything lies below ``build/foreign`` and nothing of it is committed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "foreign"
REPOSITORY = "https://github.com/huggingface/transformers"
CHECKOUT_VARIABLE = "TRANSFORMERS_SOURCE"

#: What tests import and the source distribution of transformers leaves out. A stub takes the place of what is
#: missing: a mixin without tests, and functions that skip the test that calls them.
LEFT_OUT = (
    "distributed_testing_utils.py",
    "exporters/test_export.py",
    "generation/test_utils.py",
    "utils/test_configuration_utils.py",
)
STUB = '''"""Not in the source distribution."""
import unittest

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    if name.endswith("Mixin"):
        return type(name, (), {})
    def absent(*args, **kwargs):
        raise unittest.SkipTest(f"{__name__}.{name} is not in the source distribution")
    return absent
'''


class Unavailable(Exception):
    """The tests cannot be had; the message says what was tried."""


@dataclass(frozen=True)
class Tree:
    """A folder whose ``tests`` is a package, and where it is from.

    Attributes:
        packages: A folder of packages that come before the installed ones, or ``None``.
    """

    folder: Path
    origin: str
    packages: Path | None = None


def peft_tests() -> Tree:
    """PEFT's tests from the source distribution of the installed version."""
    source = source_distribution("peft")
    (source / "tests" / "__init__.py").touch()  # left out of the distribution; the tests import each other
    return Tree(source, f"source distribution {source.name}")


@functools.cache
def transformers_common_tests() -> Tree:
    """The tests every model of transformers shares, with ``common_families.py`` to give them models."""
    source = source_distribution("transformers")
    folder = _fresh(WORK / f"{source.name}-common")
    shutil.copytree(source / "tests", folder / "tests")
    shutil.copy(Path(__file__).with_name("common_families.py"), folder / "tests" / "test_common_families.py")
    _complete(folder)
    return Tree(folder, f"source distribution {source.name}")


@functools.cache
def transformers_model_tests() -> Tree:
    """The tests of models and of generation, from a checkout.

    They run in the transformers of the checkout: tests of one version fail in another.
    """
    checkout = transformers_checkout()
    version = re.search(
        r'__version__ = "(.+?)"', (checkout / "src/transformers/__init__.py").read_text()
    ).group(1)
    folder = _fresh(WORK / "transformers-checkout")
    for part in ("tests", "utils"):  # tests import modules from both
        shutil.copytree(checkout / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(checkout / "conftest.py", folder)
    (folder / "src").symlink_to((checkout / "src").resolve())
    origin = f"checkout of {version} ({_commit(checkout)})"
    if version == importlib.metadata.version("transformers"):
        return Tree(folder, origin)
    return Tree(folder, f"{origin}, run in its own transformers", _installed(checkout))


def _installed(checkout: Path) -> Path:
    """A folder with the package of ``checkout`` and what it needs, which torch is no part of.

    Kept as long as the commit is known and nothing differs from it.
    """
    commit = _commit(checkout).removeprefix("commit ")
    folder = WORK / f"packages-{commit}"
    if folder.exists() and commit != "unknown" and not _git(checkout, "status", "--porcelain"):
        return folder
    with tempfile.TemporaryDirectory(dir=WORK) as place:
        source = Path(place, "source")  # a copy: pip builds where the sources lie
        left_out = shutil.ignore_patterns(".git", "tests", "docs", "build", "*.egg-info", "__pycache__")
        shutil.copytree(checkout, source, ignore=left_out)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = _run([*command, "--target", f"{place}/packages", str(source)], "the package of the checkout")
        if done.returncode:
            raise Unavailable(f"pip install {checkout} said: {done.stderr.strip().splitlines()[-1]}")
        shutil.rmtree(folder, ignore_errors=True)
        Path(place, "packages").rename(folder)
    return folder


def transformers_checkout() -> Path:
    """The folder named by ``TRANSFORMERS_SOURCE``, or a clone of the installed version's tag."""
    if given := os.environ.get(CHECKOUT_VARIABLE):
        if not (Path(given) / "tests" / "causal_lm_tester.py").exists():
            raise Unavailable(f"{CHECKOUT_VARIABLE}={given} has no tests/causal_lm_tester.py")
        return Path(given)
    tag = f"v{importlib.metadata.version('transformers')}"
    folder = WORK / f"transformers-{tag}"
    if not (folder / "conftest.py").exists():
        shutil.rmtree(folder, ignore_errors=True)
        command = ["git", "clone", "--quiet", "--depth", "1", "--branch", tag, REPOSITORY, str(folder)]
        done = _run(command, "a clone of transformers")
        if done.returncode:
            raise Unavailable(
                f"no checkout: {CHECKOUT_VARIABLE} is not set, and `git clone --branch {tag}` of "
                f"{REPOSITORY} said: {done.stderr.strip().splitlines()[-1]}"
            )
    return folder


def source_distribution(name: str) -> Path:
    """The unpacked source distribution of the installed version of ``name``; downloaded once."""
    version = importlib.metadata.version(name)
    folder = WORK / f"{name}-{version}"
    if (folder / "tests").exists():
        return folder
    WORK.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WORK) as place:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += ["--no-deps", "--no-binary", ":all:", "--dest", place, f"{name}=={version}"]
        done = _run(command, f"the source distribution of {name}")
        if done.returncode:
            raise Unavailable(f"pip download {name}=={version} said: {done.stderr.strip().splitlines()[-1]}")
        with tarfile.open(next(Path(place).glob("*.tar.gz"))) as archive:
            archive.extractall(place, filter="data")
        unpacked = Path(place, folder.name)
        if not (unpacked / "tests").exists():
            raise Unavailable(f"the source distribution of {name} {version} has no tests")
        unpacked.rename(folder)
    return folder


def code_under_test() -> str:
    """The last commit that changed what is tested, which a later one of documents or tests does not."""
    parts = ["--", "liteboost_adaptor", "kernels", "patches"]
    changed = _git(ROOT, "status", "--porcelain", *parts)
    return _named(_git(ROOT, "log", "-1", "--format=%H", *parts)) + (" with local changes" if changed else "")


def _run(command: list[str], what: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise Unavailable(f"{what}: {fault}") from fault


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _complete(folder: Path) -> None:
    """Add what is imported and missing, and the package where the tests look for its source."""
    for name in LEFT_OUT:
        path = folder / "tests" / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_text(STUB)
    for package in [folder / "tests", *(p for p in (folder / "tests").iterdir() if p.is_dir())]:
        (package / "__init__.py").touch()
    (folder / "src").mkdir()
    installed = importlib.metadata.distribution("transformers").locate_file("transformers")
    (folder / "src" / "transformers").symlink_to(Path(str(installed)).resolve())


def _commit(checkout: Path) -> str:
    return _named(_git(checkout, "rev-parse", "HEAD"))


def _named(commit: str) -> str:
    return f"commit {commit[:12]}" if commit else "commit unknown"


def _git(folder: Path, *command: str) -> str:
    """What git says about ``folder``; nothing where it knows it not."""
    done = subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
