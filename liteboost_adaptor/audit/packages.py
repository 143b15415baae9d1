"""Where a transformers to audit comes from, and how it is scanned without being installed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..config import child_environment
from ..errors import AuditError
from .scan import Scan

PACKAGE = "transformers"


@dataclass(frozen=True)
class Place:
    """A package to scan: what the user called it, and the folder it is imported from (None: as installed)."""

    name: str
    folder: Path | None = None


@contextlib.contextmanager
def fetched(version: str, cache: Path | None) -> Iterator[Place]:
    """A release from the package index, with the versions of its dependencies that it asks for.

    Args:
        version: Of transformers, exact.
        cache: Where it is kept and looked for; without one it is removed afterwards.

    Raises:
        AuditError: pip cannot install it.
    """
    with contextlib.ExitStack() as stack:
        base = cache or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="liteboost-audit-")))
        folder = base / f"{PACKAGE}-{version}-py{sys.version_info.major}.{sys.version_info.minor}"
        if not (folder / PACKAGE).is_dir():
            _install(f"{PACKAGE}=={version}", folder)
        yield Place(version, folder)


@contextlib.contextmanager
def unpacked(path: Path) -> Iterator[Place]:
    """A wheel, or a folder with the package in it or in its ``src``, or the package's own folder.

    Dependencies of a folder are those lying beside the package, then those of this environment; a wheel's
    are installed beside it.

    Raises:
        AuditError: There is no such package, or pip cannot install the wheel.
    """
    if path.suffix == ".whl" and path.is_file():
        with tempfile.TemporaryDirectory(prefix="liteboost-audit-") as folder:
            _install(str(path), Path(folder, "wheel"))
            yield Place(str(path), Path(folder, "wheel"))
        return
    for folder in (path, path / "src", path.parent):
        if (folder / PACKAGE / "__init__.py").is_file() and (folder != path.parent or path.name == PACKAGE):
            yield Place(str(path), folder.resolve())
            return
    raise AuditError(
        f"audit was given {str(path)!r}, which is neither a wheel nor a folder with a package called "
        f"{PACKAGE}. Give the wheel, or the folder it was unpacked into."
    )


def scan(place: Place, package: str = PACKAGE) -> Scan:
    """Scan in a process of its own, in which ``place`` comes before everything installed.

    Raises:
        AuditError: The process fails, usually because the package itself cannot be imported there.
    """
    ours = Path(__file__).resolve().parents[2]
    inherited = child_environment().get("PYTHONPATH", "").split(os.pathsep)
    path = [str(folder) for folder in (place.folder, ours, *inherited) if folder]
    environment = child_environment(
        PYTHONPATH=os.pathsep.join(path),
        LITEBOOST_LEVEL="0",  # nothing is patched that is being looked at
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_VERBOSITY="error",
    )
    with tempfile.TemporaryDirectory(prefix="liteboost-audit-") as folder:
        result = Path(folder, "scan.json")
        command = [sys.executable, "-P", "-m", "liteboost_adaptor.audit.scan", package, str(result)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode or not result.is_file():
            raise AuditError(
                f"{package} {place.name} cannot be scanned; its process ended with {done.returncode}:\n"
                f"{_tail(done.stderr)}\nInstall beside it what it asks for, or name a release."
            )
        return Scan.from_json(result.read_text(encoding="utf-8"))


def _install(what: str, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Into a folder of another name first: one that is there is complete.
    with tempfile.TemporaryDirectory(prefix=".part-", dir=folder.parent) as part:
        target = Path(part, "site")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run(
            [*command, "--only-binary", ":all:", "--target", str(target), what],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise AuditError(
                f"pip cannot install {what} to audit it:\n{_tail(done.stderr)}\n"
                "Check the version and the package index, or give --path an unpacked one."
            )
        target.rename(folder)


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-6:])
