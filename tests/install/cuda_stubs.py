"""Make a CUDA build of torch importable without its CUDA packages, for tests that run on the CPU.

PyPI's wheels for Linux are CUDA builds; what they link against is gigabytes that no CPU test calls. Each
missing library gets a stand-in with the symbols and symbol versions torch's own libraries ask of it, every
function returning 100 (cudaErrorNoDevice). Nothing that is measured or compared runs through them.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

_CUDA_LIBRARY = re.compile(r"lib(cu|nv|nccl)")
_CUDA_SYMBOL = re.compile(r"(cu|__cuda|nccl|nv)", re.IGNORECASE)


@dataclass
class Links:
    """What a set of libraries needs and defines."""

    needed: set[str] = field(default_factory=set)
    undefined: dict[str, str] = field(default_factory=dict)  # symbol -> version, "" for none
    defined: set[str] = field(default_factory=set)
    home: dict[str, str] = field(default_factory=dict)  # version -> library it belongs to


def add_stubs(site: Path) -> list[str]:
    """Write the stand-ins beside the libraries of the torch in ``site``, where its RPATH looks.

    Returns:
        The names of the libraries that were missing.

    Raises:
        subprocess.CalledProcessError: readelf, nm or gcc failed.
    """
    folder = site / "torch" / "lib"
    libraries = sorted(folder.glob("*.so*"))
    links = Links()
    for library in libraries:
        _read(library, links)
    missing = sorted(links.needed - {library.name for library in libraries})
    names = [name for name in missing if _CUDA_LIBRARY.match(name)]
    for name in names:
        _write(folder, name, _symbols(name, names, links))
    return names


def _read(library: Path, links: Links) -> None:
    for line in _lines("readelf", "--dynamic", library):
        if found := re.search(r"NEEDED.*\[(.*)\]", line):
            links.needed.add(found[1])
    owner = None
    for line in _lines("readelf", "--version-info", "--wide", library):
        if found := re.search(r"File: (\S+)", line):
            owner = found[1]
        elif owner and (found := re.search(r"Name: (\S+)\s+Flags", line)):
            links.home[found[1]] = owner
    for line in _lines("nm", "--dynamic", library):
        *_, kind, symbol = line.split()
        name, _, version = symbol.partition("@")
        if kind in "Uwv":
            links.undefined[name] = version.lstrip("@")
        else:
            links.defined.add(name)


def _symbols(library: str, stubs: list[str], links: Links) -> dict[str, list[str]]:
    """Symbols, by version, that ``library`` has to offer; the first of ``stubs`` takes those without one."""
    symbols: dict[str, list[str]] = defaultdict(list)
    for name, version in links.undefined.items():
        if name in links.defined:
            continue
        unversioned = not version and library == stubs[0] and _CUDA_SYMBOL.match(name)
        if unversioned or (version and links.home.get(version) == library):
            symbols[version].append(name)
    return symbols


def _write(folder: Path, library: str, symbols: dict[str, list[str]]) -> None:
    source, script = folder / "stub.c", folder / "stub.map"
    names = [name for group in symbols.values() for name in group]
    source.write_text("\n".join(f"int {name}(void) {{ return 100; }}" for name in [*names, "liteboost_stub"]))
    versions = {version: group for version, group in symbols.items() if version}
    script.write_text(
        "".join(f"{version} {{ global: {'; '.join(group)}; }};\n" for version, group in versions.items())
    )
    with_versions = [f"-Wl,--version-script={script}"] if versions else []
    command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{library}", *with_versions]
    subprocess.run([*command, "-o", str(folder / library), str(source)], check=True, capture_output=True)


def _lines(*command: str | Path) -> list[str]:
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=True
    ).stdout.splitlines()
