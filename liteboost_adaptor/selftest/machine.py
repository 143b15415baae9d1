"""On what a comparison holds: the device, CANN, torch_npu, and our own kernels."""

from __future__ import annotations

import functools
import hashlib
import sys
from pathlib import Path
from typing import Any

import torch

from .. import __version__, native_npu


@functools.cache
def identity() -> dict[str, Any]:
    """All that an answer about an op on the NPU depends on, as JSON types. Read once per process."""
    status = native_npu.status()
    return {
        "soc": torch.ops.liteboost._npu_soc(),
        "cann": cann_version(),
        "torch": str(torch.__version__),
        "torch_npu": str(sys.modules["torch_npu"].__version__),
        "liteboost_adaptor": __version__,
        "kernels": _digest([status.path] if status and status.path else []),
        "cases": _digest(sorted(Path(__file__).parent.rglob("*.py"))),
        "operators": _operator_libraries(),
    }


def cann_version() -> str:
    """CANN's own version, ``"unknown"`` where it does not say."""
    try:
        return str(torch.npu.utils.get_cann_version()) or "unknown"
    except (AttributeError, RuntimeError):
        return "unknown"


def _operator_libraries() -> list[list[Any]]:
    """[path, bytes, time of change] of each library the operators were found in: vendors replace them."""
    paths = {found.get("library") for found in native_npu.operators().values()} - {None, ""}
    libraries = []
    for path in sorted(paths):
        try:
            facts = Path(path).stat()
        except OSError:  # replaced or renamed since it was loaded
            libraries.append([path])
        else:
            libraries.append([path, facts.st_size, facts.st_mtime_ns])
    return libraries


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
