"""Releases of torch to compile against without installing them: headers and names out of their wheels.

A wheel of torch holds the same headers whatever device it is for, but for macros that nothing of ours reads.
The libraries beside them are empty ones of the same names: a library that is linked with them asks for those
of the torch it is loaded into. What these export is kept as a list, with which `missing` compares what a
library needs.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

#: Minor version of torch -> the release that is compiled against: the first, since later ones only add.
RELEASES = {
    "2.10": "2.10.0",
    "2.11": "2.11.0",
    "2.12": "2.12.0",
    "2.13": "2.13.0",
    "2.14": "2.14.0",
    "2.15": "2.15.0",
}
LIBRARIES = ("libtorch_cpu.so", "libc10.so")
EXPORTED = "exported.txt"
#: Of the OpenMP runtime: found in the one that torch loaded, under whatever name (kernels/CMakeLists.txt).
OPENMP = re.compile(r"(GOMP|omp)_\w+")


def fetched(release: str, machine: str, folder: Path) -> Path:
    """A folder ``torch`` to compile against, made of PyPI's wheel unless it is there already.

    Args:
        release: As ``2.13.0``.
        machine: ``x86_64`` or ``aarch64``.
        folder: Where it is kept.

    Raises:
        subprocess.CalledProcessError: The wheel cannot be fetched, or the compiler or readelf failed.
    """
    prefix = folder / f"torch-{release}-{machine}" / "torch"
    if prefix.is_dir():
        return prefix
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / "made"
        _extract(_download(release, machine, Path(scratch)), made)
        _empty_libraries(made / "torch" / "lib", machine)
        made.rename(prefix.parent)
    return prefix


def missing(library: Path, prefix: Path) -> set[str]:
    """Names that ``library`` needs and neither torch nor an OpenMP runtime has.

    What the C and C++ libraries have carries a version, at which auditwheel looks.
    """
    exported = set((prefix / "lib" / EXPORTED).read_text(encoding="utf-8").splitlines())
    needed = {name for name, defined, weak in _dynamic_symbols(library) if not defined and not weak}
    return {name for name in needed - exported if "@" not in name and not OPENMP.fullmatch(name)}


def exported_names(library: Path) -> set[str]:
    """What a library defines for others."""
    return {name.partition("@")[0] for name, defined, _ in _dynamic_symbols(library) if defined}


def _download(release: str, machine: str, folder: Path) -> Path:
    # Of any Python: headers and libtorch_cpu.so are the same in all.
    which = ["--only-binary=:all:", "--platform", f"manylinux_2_28_{machine}", "--python-version", "3.12"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *which, "--dest", str(folder)]
    subprocess.run([*command, f"torch=={release}"], check=True)
    (wheel,) = folder.glob("torch-*.whl")
    return wheel


def _extract(wheel: Path, folder: Path) -> None:
    wanted = ("torch/include/", "torch/version.py", "torch/share/cmake/Torch/")
    libraries = tuple(f"torch/lib/{name}" for name in LIBRARIES)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(
            folder, [name for name in archive.namelist() if name.startswith(wanted) or name in libraries]
        )


def _empty_libraries(folder: Path, machine: str) -> None:
    """Note what the libraries in ``folder`` export, and put empty ones in their place."""
    names: set[str] = set()
    for name in LIBRARIES:
        names |= exported_names(folder / name)
        (folder / name).unlink()
        options = ["-shared", "-nostdlib", f"-Wl,-soname,{name}", "-x", "c", "/dev/null"]
        subprocess.run([compiler(machine), *options, "-o", str(folder / name)], check=True)
    (folder / EXPORTED).write_text("\n".join(sorted(names)), encoding="utf-8")


def compiler(machine: str) -> str:
    """The C++ compiler for ``machine``, as Debian calls it.

    Raises:
        SystemExit: It is not installed; says how to get it.
    """
    name = f"{machine}-linux-gnu-g++"
    if shutil.which(name) is None:
        package = "g++" if machine == "x86_64" else f"g++-{machine}-linux-gnu"
        raise SystemExit(
            f"the wheel for {machine} is compiled with {name}, which is not on the PATH. "
            f"Debian: apt-get install {package}."
        )
    return name


def _dynamic_symbols(library: Path) -> list[tuple[str, bool, bool]]:
    """(name with its version, defined, weak) of every dynamic symbol."""
    text = subprocess.run(
        ["readelf", "--wide", "--dyn-syms", str(library)], capture_output=True, text=True, check=True
    ).stdout
    # Num: Value Size Type Bind Vis Ndx Name
    rows = [line.split() for line in text.splitlines() if re.match(r"\s*\d+: ", line)]
    return [(row[7], row[6] != "UND", row[4] == "WEAK") for row in rows if len(row) > 7]
