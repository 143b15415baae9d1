"""What our ops are on an NPU: ``_C_npu.so`` where it serves them, else their references, counted.

The C++ side (``kernels/npu``) decides call by call and calls back into the namespace defined here.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from .registry import NAMESPACE, npu_ops, ops

#: The references under the schemas of the ops, where the C++ side finds them.
REFERENCES = "liteboost_reference"
DISPATCH_KEY = "PrivateUse1"

_LIBRARIES: list[torch.library.Library] = []


def register_references() -> None:
    """Define ``torch.ops.liteboost_reference.*`` and the comparison that `_C_npu.so` asks for. Idempotent."""
    if _LIBRARIES:
        return
    library = torch.library.Library(REFERENCES, "FRAGMENT")
    _LIBRARIES.append(library)
    for op in (*ops().values(), *npu_ops().values()):
        library.define(op.schema)
        library.impl(op.name, op.reference, "CompositeExplicitAutograd")
    library.define("_verify(str op, str kind) -> str")
    library.impl("_verify", _verify, "CompositeExplicitAutograd")


def serve_the_rest(reason: str) -> list[str]:
    """Give every op without an NPU kernel its reference there; return their names.

    Args:
        reason: Why they have none, as it is counted.
    """
    library = torch.library.Library(NAMESPACE, "IMPL")
    _LIBRARIES.append(library)
    missing = [op for op in ops().values() if not _has_kernel(op.name)]
    for op in missing:
        library.impl(op.name, _counted(op.name, op.reference, reason), DISPATCH_KEY)
    return [op.name for op in missing]


def _has_kernel(name: str) -> bool:
    qualified = f"{NAMESPACE}::{name}"
    return any(
        torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key)
        for key in (DISPATCH_KEY, "CompositeExplicitAutograd")
    )


def _counted(name: str, reference: Callable[..., Any], reason: str) -> Callable[..., Any]:
    @functools.wraps(reference)
    def run(*args: Any, **kwargs: Any) -> Any:
        if hasattr(torch.ops.liteboost, "_npu_count_fallback"):
            torch.ops.liteboost._npu_count_fallback(name, reason)
        return reference(*args, **kwargs)

    return run


def _verify(op: str, kind: str) -> str:
    # By name, not by an import: what compares ops stands above this module.
    return importlib.import_module("liteboost_adaptor.selftest.first_use").verdict(op, kind)
