"""Find, check and load the compiled kernels, ``_C.so``; without them models are left alone.

The reference ops, which are then registered in their place, serve tests and ``selftest``.

A library is used only with the very torch it was compiled for: another one would answer with an undefined
symbol or, worse, with wrong numbers. `liteboost_adaptor.native_build` compiles one. A wheel for all torches
has one for each minor version, which serves its releases for any device (decision 61).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import mmap
import os
import platform
import re
import struct
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from types import MappingProxyType
from typing import Any

from . import config
from .errors import NativeLibraryError

LIBRARY = "_C.so"
BUILD_INFO = "_build_info.json"
BUILD_COMMAND = "python -m liteboost_adaptor build"
PACKAGE_DIR = Path(__file__).resolve().parent
#: Of a wheel for all torches: ``torch-2.13/_C.so`` and so on, and the loops that they share.
PREBUILT = PACKAGE_DIR / "_prebuilt"

_NO_INFO: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class NativeStatus:
    """What `load` found.

    Attributes:
        loaded: The compiled kernels serve ``torch.ops.liteboost``; otherwise the reference ops do.
        path: The library loaded; when none was, the one refused first, or None if there was none.
        reason: None when loaded, else why not: the file and the loader's words first.
        build_info: What the library was built with: torch, cxx11_abi, compiler, processor, isas.
        isa: The instruction set in use, None for the reference ops.
    """

    loaded: bool
    path: Path | None = None
    reason: str | None = None
    build_info: Mapping[str, Any] = field(default_factory=lambda: _NO_INFO)
    isa: str | None = None

    @property
    def backend(self) -> str:
        """``"native"`` or ``"reference"``."""
        return "native" if self.loaded else "reference"

    @property
    def sentence(self) -> str:
        """One sentence for the user: what runs, why, and what to do about it."""
        if self.loaded:
            return f"compiled kernels from {self.path}, instruction set {self.isa}"
        return (
            f"liteboost_adaptor: {self.reason}; models run their original code. "
            f"To compile the kernels for the torch and the CPU that are here: {BUILD_COMMAND}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The status as plain JSON types."""
        return {
            "backend": self.backend,
            "loaded": self.loaded,
            "path": str(self.path) if self.path else None,
            "reason": self.reason,
            "isa": self.isa,
            "build_info": dict(self.build_info),
        }


@dataclass(frozen=True)
class Candidate:
    """A library on disk, and why it cannot be used (None: nothing speaks against it)."""

    path: Path
    build_info: Mapping[str, Any]
    reason: str | None


def torch_version() -> str | None:
    """``torch.__version__`` without importing torch; None where torch is not installed.

    The metadata is no substitute: a CUDA wheel's says ``2.13.0`` where torch says ``2.13.0+cu130``.
    """
    return version_of("torch")


def version_of(package: str) -> str | None:
    """``__version__`` of torch or torch_npu, from its ``version.py`` where it is not imported."""
    if module := sys.modules.get(package):
        return str(module.__version__)
    # The path finder also sees torch_npu where `environment` hides it, because CANN is not there to run it.
    spec = importlib.util.find_spec(package) or PathFinder.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        try:
            source = (Path(folder) / "version.py").read_text(encoding="utf-8")
        except OSError:
            continue
        for line in source.splitlines():
            if line.startswith("__version__"):
                return line.partition("=")[2].strip().strip("'\"")
    return None


def minor_version(torch: str | None) -> str | None:
    """``"2.13"`` of ``"2.13.1+cu130"``; None of what is no release, and of None.

    The headers of the releases of a minor version are the same, for whatever device. Of builds between two
    releases (``2.14.0a0``, ``2.14.0.dev…``) nobody knows.
    """
    found = re.fullmatch(r"(\d+\.\d+)\.\d+(\+.*)?", torch or "")
    return found[1] if found else None


def build_folders() -> tuple[Path, Path]:
    """Where libraries built by the user lie: in the package if it is writable, else in the user's cache."""
    return PACKAGE_DIR / "_native", config.user_cache_dir() / "native"


def build_key(torch: str) -> str:
    """The part of a build folder's name that says whom it serves: us, torch, the processor."""
    from . import __version__

    return f"liteboost-{__version__}-torch-{torch}-{platform.machine()}".replace("/", "_")


def candidates() -> list[Candidate]:
    """Every library there is, the most recent first, each checked without loading it.

    The most recent is the one the user asked for last, be it by ``build`` or by installing again.
    """
    torch = torch_version()
    paths = {path.resolve() for path in _packaged()}
    if torch is not None:
        for folder in build_folders():
            paths.update(path.resolve() for path in folder.glob(f"{build_key(torch)}-*/{LIBRARY}"))
    newest_first = sorted(paths, key=lambda path: (path.stat().st_mtime_ns, str(path)), reverse=True)
    found = [inspect(path, torch) for path in newest_first]
    return found + _prebuilt_for_others(torch)


def find() -> Candidate | None:
    """The library `load` would take: the newest usable one, else the newest, else None."""
    found = candidates()
    return next((each for each in found if each.reason is None), found[0] if found else None)


def _packaged() -> list[Path]:
    # An editable install keeps the library in site-packages, apart from __init__.py: only the import
    # system knows where.
    spec = importlib.util.find_spec("liteboost_adaptor._C")
    places = [PACKAGE_DIR / LIBRARY]
    if spec is not None and spec.origin:
        places.append(Path(spec.origin))
    if minor := minor_version(torch_version()):
        places.append(PREBUILT / f"torch-{minor}" / LIBRARY)
    return [path for path in places if path.is_file()]


def _prebuilt_for_others(torch: str | None) -> list[Candidate]:
    """One refusal of all that a wheel brings, where none of it is for ``torch``."""
    found = (path.parent.name.removeprefix("torch-") for path in PREBUILT.glob(f"torch-*/{LIBRARY}"))
    served = sorted(found, key=lambda minor: [int(part) for part in minor.split(".")])
    if not served or minor_version(torch) in served:
        return []
    words = f"{PREBUILT} has kernels for releases of torch {', '.join(served)}, found {torch or 'no torch'}"
    return [Candidate(PREBUILT, _NO_INFO, words)]


def inspect(path: Path, torch: str | None, build_info: str = BUILD_INFO) -> Candidate:
    """Read a library's build info and headers, and compare them with ``torch`` and this machine.

    Args:
        path: The library.
        torch: The version it is to be used with.
        build_info: The file beside it that says what it was built with.
    """
    try:
        info = json.loads((path.parent / build_info).read_text(encoding="utf-8"))
        if not isinstance(info, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError) as fault:
        why = f"{path} cannot be trusted: no readable {build_info} beside it ({fault})"
        return Candidate(path, _NO_INFO, why)
    reason = _mismatch(path, info, torch) or damage(path) or _without_loops(path, info)
    reason = reason or _stale_info(path, info, build_info)
    return Candidate(path, MappingProxyType(info), reason)


def _mismatch(path: Path, info: Mapping[str, Any], torch: str | None) -> str | None:
    built_for = info.get("torch")
    minor = info.get("torch_minor")  # of a wheel: for all its releases
    if built_for != torch and (minor is None or minor != minor_version(torch)):
        return f"{path} was built for torch {built_for}, found {torch or 'no torch'}"
    processor = info.get("processor", platform.machine())
    if processor != platform.machine():
        return f"{path} was built for {processor}, this machine is {platform.machine()}"
    if module := sys.modules.get("torch"):
        found = int(module._C._GLIBCXX_USE_CXX11_ABI)
        if int(info.get("cxx11_abi", found)) != found:
            return (
                f"{path} was built for the C++11 ABI {info['cxx11_abi']} of torch {built_for}, "
                f"found ABI {found}"
            )
    return None


def _stale_info(path: Path, info: Mapping[str, Any], build_info: str) -> str | None:
    inside = embedded_build_info(path)
    if inside and inside.get("torch") != info.get("torch"):
        return (
            f"{path} was built for torch {inside.get('torch')}, though the {build_info} beside it says "
            f"{info.get('torch')}"
        )
    return None


def _without_loops(path: Path, info: Mapping[str, Any]) -> str | None:
    """Why the loops that a library of a wheel shares with others are no good, or None."""
    return damage(path.parent.parent / info["loops"]) if "loops" in info else None


def damage(path: Path) -> str | None:
    """Why ``path`` is no whole 64-bit ELF file, or None.

    The loader maps what the headers promise: a truncated file loads and then kills the process (SIGBUS) at
    the first page that is not there. So the size is held against what the section and segment tables say.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(64)
            if len(header) < 64 or header[:5] != b"\x7fELF\x02":
                return f"{path} is no 64-bit ELF library ({size} bytes)"
            order = "<" if header[5] == 1 else ">"
            segments, sections = struct.unpack_from(f"{order}QQ", header, 0x20)
            segment_size, segment_count, section_size, section_count = struct.unpack_from(
                f"{order}4H", header, 0x36
            )
            ends = [sections + section_size * section_count]
            file.seek(segments)
            table = file.read(segment_size * segment_count)
    except OSError as fault:
        return f"{path} cannot be read: {fault.strerror}"
    for start in range(0, len(table) - 55, segment_size or len(table)):
        offset, _, _, length = struct.unpack_from(f"{order}4Q", table, start + 8)
        ends.append(offset + length)
    if size < max(ends):
        return f"{path} is truncated: {size} bytes, its headers describe {max(ends)}"
    return None


def embedded_build_info(path: Path) -> Mapping[str, Any]:
    """The build info compiled into the library, read from the file; empty when it holds none.

    From the end, where constants lie: all code lies before them.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = content.rfind(b'{"torch": "')
        text = content[start : start + 4096].decode("utf-8", "replace") if start >= 0 else ""
    try:
        return MappingProxyType(json.JSONDecoder().raw_decode(text)[0])
    except ValueError:
        return _NO_INFO


lock = threading.RLock()
# Held through a fork: one that another thread holds at that moment would never be released in the child.
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
_done: list[NativeStatus] = []  # empty, then the one status of this process
_said: list[NativeStatus] = []  # empty, then the status that was warned of


def load() -> NativeStatus:
    """Load the compiled kernels, or register the reference ops under the same names. Once per process.

    Afterwards ``torch.ops.liteboost.*`` exists, whatever happened. A failure is said in one warning.

    Raises:
        NativeLibraryError: ``LITEBOOST_REQUIRE_NATIVE=1`` and the compiled kernels cannot be used.
        ImportError: torch is not installed, or its own import fails.
    """
    with lock:
        status = _load_once()
        if status.loaded:
            return status
        if config.settings().require_native:
            raise NativeLibraryError(
                f"LITEBOOST_REQUIRE_NATIVE=1 asks for the compiled kernels; {status.reason}. "
                f"Compile them with `{BUILD_COMMAND}`, or unset LITEBOOST_REQUIRE_NATIVE."
            )
        if not _said:
            _said.append(status)
            warn(status.sentence)
    return status


def require(what: str) -> NativeStatus:
    """Load the compiled kernels for something that was asked for and cannot be done without them.

    Args:
        what: It, as the subject of a sentence.

    Raises:
        NativeLibraryError: They cannot be used; says what to run.
    """
    with lock:
        status = _load_once()
    if not status.loaded:
        raise NativeLibraryError(
            f"{what} needs the compiled kernels; {status.reason}. Compile them with `{BUILD_COMMAND}`."
        )
    return status


def warn(sentence: str) -> None:
    """Warn at the user's own line, which may call transformers to call us."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in _NOT_THE_USERS:
        level, frame = level + 1, frame.f_back
    warnings.warn(sentence, RuntimeWarning, stacklevel=level)


_NOT_THE_USERS = ("liteboost_adaptor", "transformers", "torch")


def _load_once() -> NativeStatus:
    if not _done:
        _done.append(_load())
    return _done[0]


def status() -> NativeStatus | None:
    """What `load` found in this process, or None before its first call. Loads nothing."""
    return _done[0] if _done else None


def _load() -> NativeStatus:
    import torch

    if loaded := _already_registered(torch):
        return loaded
    found = candidates()
    refusals = [each for each in found if each.reason is not None]
    for each in found:
        if each.reason is not None:
            continue
        try:
            torch.ops.load_library(str(each.path))
        except OSError as fault:
            refusals.insert(0, Candidate(each.path, each.build_info, loader_words(each.path, fault)))
            continue
        return _within_limits(torch, each.path, each.build_info)
    # By name, not by an import: ops stands above this module and imports it.
    importlib.import_module("liteboost_adaptor.ops").register_reference_ops()
    if not refusals:
        return NativeStatus(False, reason=f"no kernels compiled for torch {torch.__version__} are installed")
    reason = "; ".join(each.reason for each in refusals if each.reason)
    return NativeStatus(False, refusals[0].path, reason, refusals[0].build_info)


def _already_registered(torch: Any) -> NativeStatus | None:
    # Someone called torch.ops.load_library on our library. Loading it a second time from another path would
    # define every op twice, and a C++ exception from a static constructor ends the process.
    if not hasattr(torch.ops.liteboost, "_build_info"):
        return None
    path = next((Path(each) for each in torch.ops.loaded_libraries if Path(each).name == LIBRARY), None)
    info = MappingProxyType(json.loads(torch.ops.liteboost._build_info()))
    return _within_limits(torch, path, info)


def loader_words(path: Path, fault: OSError) -> str:
    """The path and what the dynamic loader says of it."""
    # Since 2.13 torch wraps the loader's error in one that only repeats the path.
    words = str(fault.__cause__ or fault).strip() or type(fault).__name__
    return words if words.startswith(str(path)) else f"{path}: {words}"


def _within_limits(torch: Any, path: Path | None, info: Mapping[str, Any]) -> NativeStatus:
    """The library that is loaded, in the best instruction set allowed; refused where that leaves none."""
    limit = config.settings().isa
    isa = _best_within(limit, torch.ops.liteboost._isas())
    if isa is None:
        compiled = ", ".join(info["isas"])
        where = f"LITEBOOST_ISA={limit} allows" if limit else "this CPU, or ATEN_CPU_CAPABILITY, allows"
        return NativeStatus(False, path, f"{path}: compiled for {compiled}, of which {where} none", info)
    torch.ops.liteboost._limit_isa(isa)
    return NativeStatus(True, path, None, info, isa)


def _best_within(limit: str, offered: Sequence[str]) -> str | None:
    """The best instruction set of those ``offered`` that is not above ``limit``, which may not be among them.

    No limit, or one for CPUs of another architecture, limits nothing. None where none is left.
    """
    for order in (config.X86_ISAS, config.ARM_ISAS):
        if limit in order and set(offered) <= set(order):
            offered = [isa for isa in offered if order.index(isa) <= order.index(limit)]
    return offered[-1] if offered else None
