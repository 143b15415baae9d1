"""Find, check and load the NPU kernels, ``_C_npu.so``; without them models on an NPU are left alone.

Loaded once torch_npu is imported and sees a device; `liteboost_adaptor.native` must have loaded before.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import config, native
from .errors import NativeLibraryError
from .native import Candidate

LIBRARY = "_C_npu.so"
BUILD_INFO = "_build_info_npu.json"


@dataclass(frozen=True)
class NpuStatus:
    """What `load` found.

    Attributes:
        loaded: The aclnn kernels serve our ops on an NPU. Otherwise models there run their original code, and
            ops that are called directly their references.
        path: The library loaded, or the one refused; None if there was none.
        reason: None when loaded, else why not.
        build_info: What it was built with: torch, torch_npu, cxx11_abi, compiler, processor.
        references: Ops that have no NPU kernel.
    """

    loaded: bool
    path: Path | None = None
    reason: str | None = None
    build_info: Mapping[str, Any] = field(default_factory=dict)
    references: tuple[str, ...] = ()

    @property
    def backend(self) -> str:
        """``"aclnn"`` or ``"reference"``."""
        return "aclnn" if self.loaded else "reference"

    @property
    def sentence(self) -> str:
        """One sentence for the user: what runs on the NPU, why, and what to do about it."""
        if self.loaded:
            return f"aclnn kernels from {self.path}"
        return (
            f"liteboost_adaptor: {self.reason}; on the NPU models run their original code. "
            f"To compile the kernels for the torch_npu installed now: {native.BUILD_COMMAND}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The status as plain JSON types, with what was found, refused and counted so far.

        ``operators`` and ``calls`` are those of this module, ``refused`` its `verdicts` with a reason, and
        ``lines`` all of it in words.
        """
        return {
            "backend": self.backend,
            "path": str(self.path) if self.path else None,
            "reason": self.reason,
            "build_info": dict(self.build_info),
            "references": list(self.references),
            "operators": operators(),
            "refused": [list(each) for each in verdicts() if each[2]],
            "calls": [list(each) for each in calls()],
            "lines": self.lines(),
        }

    def lines(self) -> list[str]:
        """What the kernels served so far and what they did not, with the reasons: a sentence each."""
        served = sum(count for _, reason, count in calls() if not reason)
        lines = [f"NPU: {self.backend} ops, {served} calls served by aclnn operators"]
        if self.reason:
            lines.append(f"  {self.reason}")
        lines += [f"  {op} refused: {reason}" for op, _, reason in verdicts() if reason]
        lines += [f"  {op}: {count} calls of the reference: {why}" for op, why, count in calls() if why]
        return lines


_done: list[NpuStatus] = []  # empty, then the one status of this process


def present() -> bool:
    """Whether torch_npu is imported and sees a device. Imports nothing."""
    # Hidden where CANN is missing, it is there as None (`environment.backend_autoload`).
    return sys.modules.get("torch_npu") is not None and bool(sys.modules["torch"].npu.is_available())


def status() -> NpuStatus | None:
    """What `load` found in this process, or None before its first call with an NPU. Loads nothing."""
    return _done[0] if _done else None


def load() -> NpuStatus | None:
    """Load the NPU kernels, or register the reference ops for the NPU, once per process; None without one.

    Raises:
        NativeLibraryError: ``LITEBOOST_REQUIRE_NATIVE=1`` and the kernels cannot be used.
    """
    with native.lock:
        if not _done:
            if not present():
                return None
            cpu = native.load()
            _done.append(_load())
            # Without the CPU library there are no schemas either, which has been said then.
            if cpu.loaded and not _done[0].loaded and not config.settings().require_native:
                native.warn(_done[0].sentence)
    if not _done[0].loaded and config.settings().require_native:
        raise NativeLibraryError(
            f"LITEBOOST_REQUIRE_NATIVE=1 asks for the compiled kernels; {_done[0].reason}. "
            f"Compile them with `{native.BUILD_COMMAND}`, or unset LITEBOOST_REQUIRE_NATIVE."
        )
    return _done[0]


def operators() -> dict[str, dict[str, Any]]:
    """The aclnn operators the kernels use, by name; empty if not loaded.

    ``signature``; ``available``: whether this CANN has it; ``library``: the file it was found in.
    """
    return _asked("_npu_operators", {})


def verdicts() -> list[tuple[str, str, str]]:
    """(op, kind, reason or ``""``) of all that was compared with a reference, or known to have been."""
    return [tuple(each) for each in _asked("_npu_verdicts", [])]


def calls() -> list[tuple[str, str, int]]:
    """(op, reason of a fallback or ``""`` for served, calls) so far."""
    return [tuple(each) for each in _asked("_npu_counts", [])]


def _asked(name: str, otherwise: Any) -> Any:
    """What a function of the library answers in JSON."""
    if not _done or not _done[0].loaded:
        return otherwise
    return json.loads(getattr(sys.modules["torch"].ops.liteboost, name)())


def torch_npu_version() -> str | None:
    """``torch_npu.__version__`` without importing torch_npu; None where it is not installed."""
    return native.version_of("torch_npu")


def candidates() -> list[Candidate]:
    """Every library there is, each checked without loading it: the most recent first."""
    paths = {path.resolve() for path in _packaged()}
    if torch := native.torch_version():
        for folder in native.build_folders():
            paths.update(path.resolve() for path in folder.glob(f"{native.build_key(torch)}-*/{LIBRARY}"))
    newest_first = sorted(paths, key=lambda path: (path.stat().st_mtime_ns, str(path)), reverse=True)
    return [inspect(path) for path in newest_first]


def _packaged() -> list[Path]:
    # An editable install keeps the library apart from the package, see `native`.
    spec = importlib.util.find_spec("liteboost_adaptor._C_npu")
    places = [native.PACKAGE_DIR / LIBRARY]
    if spec is not None and spec.origin:
        places.append(Path(spec.origin))
    return [path for path in places if path.is_file()]


def find() -> Candidate | None:
    """The library `load` would take: the newest usable one, else the newest, else None."""
    found = candidates()
    return next((each for each in found if each.reason is None), found[0] if found else None)


def inspect(path: Path) -> Candidate:
    """Compare a library's build info and headers with torch, torch_npu, the CPU library and this machine."""
    found = native.inspect(path, native.torch_version(), BUILD_INFO)
    info = found.build_info
    reason = found.reason or _mismatch(path, info)
    return Candidate(path, info, reason)


def _mismatch(path: Path, info: Mapping[str, Any]) -> str | None:
    inside = native.embedded_build_info(path)
    installed = torch_npu_version()
    for built_for in (info.get("torch_npu"), inside.get("torch_npu", installed)):
        if built_for != installed:
            return f"{path} was built for torch_npu {built_for}, found {installed or 'no torch_npu'}"
    cpu = native.status() or native.find()
    expected = cpu.build_info.get("schemas") if cpu else None
    if expected is not None and info.get("schemas") != expected:
        return f"{path} was built from other sources than {cpu.path if cpu else None}"
    return None


def _load() -> NpuStatus:
    # By name, not by an import: ops stands above this module and imports it.
    on_npu = importlib.import_module("liteboost_adaptor.ops.on_npu")
    on_npu.register_references()
    if not native.load().loaded:
        refusals = ["the CPU library is not loaded, and without it the NPU kernels have no schemas"]
        return NpuStatus(False, None, refusals[0], {}, tuple(on_npu.serve_the_rest(refusals[0])))
    found = candidates()
    refusals = [each.reason for each in found if each.reason is not None]
    for each in found:
        if each.reason is not None:
            continue
        try:
            sys.modules["torch"].ops.load_library(str(each.path))
        except OSError as fault:
            refusals.insert(0, native.loader_words(each.path, fault))
            continue
        rest = on_npu.serve_the_rest("no NPU kernel yet")
        return NpuStatus(True, each.path, None, each.build_info, tuple(rest))
    reason = (
        "; ".join(refusals) or f"no NPU kernels compiled for torch_npu {torch_npu_version()} are installed"
    )
    first = found[0] if found else None
    rest = on_npu.serve_the_rest(reason)
    return NpuStatus(
        False, first.path if first else None, reason, first.build_info if first else {}, tuple(rest)
    )
