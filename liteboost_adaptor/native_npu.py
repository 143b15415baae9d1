"""Find, check and load the NPU kernels, ``_C_npu.so``, where an NPU is; else the reference ops serve it.

Loaded once torch_npu is imported and sees a device; `liteboost_adaptor.native` must have loaded before.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import config, native
from .errors import NativeLibraryError

LIBRARY = "_C_npu.so"
BUILD_INFO = "_build_info_npu.json"


@dataclass(frozen=True)
class NpuStatus:
    """What `load` found.

    Attributes:
        loaded: The aclnn kernels serve our ops on an NPU; otherwise the reference ops do.
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
            f"liteboost_adaptor: {self.reason}; on the NPU the reference ops (plain PyTorch) are used. "
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
    return "torch_npu" in sys.modules and bool(sys.modules["torch"].npu.is_available())


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
            native.load()
            _done.append(_load())
            if not _done[0].loaded and not config.settings().require_native:
                warnings.warn(_done[0].sentence, RuntimeWarning, stacklevel=2)
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


def _load() -> NpuStatus:
    # By name, not by an import: ops stands above this module and imports it.
    on_npu = importlib.import_module("liteboost_adaptor.ops.on_npu")
    on_npu.register_references()
    path, info, reason = _usable()
    if path is not None and reason is None:
        try:
            sys.modules["torch"].ops.load_library(str(path))
        except OSError as fault:
            reason = str(fault.__cause__ or fault)
    if reason is None and not native.load().loaded:
        reason = "the CPU library is not loaded, and without it the NPU kernels have no schemas"
    if reason is not None:
        references = on_npu.serve_the_rest(reason)
        return NpuStatus(False, path, reason, info, tuple(references))
    return NpuStatus(True, path, None, info, tuple(on_npu.serve_the_rest("no NPU kernel yet")))


def _usable() -> tuple[Path | None, Mapping[str, Any], str | None]:
    """The newest library, its build info, and why it cannot be used."""
    beside = [each.path.parent for each in native.candidates() if each.reason is None]
    found = [folder / LIBRARY for folder in (*beside, native.PACKAGE_DIR) if (folder / LIBRARY).is_file()]
    if not found:
        return None, {}, "no NPU kernels are compiled"
    path = found[0]
    try:
        info = json.loads((path.parent / BUILD_INFO).read_text(encoding="utf-8"))
        if not isinstance(info, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError) as fault:
        return path, {}, f"{path} cannot be trusted: no readable {BUILD_INFO} beside it ({fault})"
    for name in ("torch", "torch_npu"):
        version = str(sys.modules[name].__version__)
        if info.get(name) != version:
            return path, info, f"{path} was built for {name} {info.get(name)}, found {version}"
    return path, info, native.damage(path)
