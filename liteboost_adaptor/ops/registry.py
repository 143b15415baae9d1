"""The table of ops: name, schema, reference. What the native library lacks is served from here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "liteboost"

_OPS: dict[str, Op] = {}
_NPU_OPS: dict[str, Op] = {}
# Definitions live as long as their Library object does.
_LIBRARIES: list[torch.library.Library] = []


@dataclass(frozen=True)
class Op:
    """One op.

    Attributes:
        name: Without the namespace: ``rms_norm``.
        schema: As the C++ library registers it, without the namespace; a test compares the two.
        reference: The same calculation in plain PyTorch: the fallback, and the oracle of the tests.
    """

    name: str
    schema: str
    reference: Callable[..., Any]

    @property
    def written(self) -> tuple[str, ...]:
        """The arguments that a call changes, as the schema says: ``Tensor(a!) state``."""
        return tuple(re.findall(r"\(\w+!\)\??\s+(\w+)", self.schema))

    def outputs(self, result: Any, arguments: Mapping[str, Any]) -> list[Tensor]:
        """All that a call gives.

        Args:
            result: What the call returned.
            arguments: What it was called with, by name; those it writes to come behind its results.
        """
        results = [result] if isinstance(result, Tensor) else list(result or ())
        return results + [arguments[name] for name in self.written]


def define(schema: str, reference: Callable[..., Any]) -> None:
    """Record an op; nothing is registered with torch until `register_reference_ops`.

    Args:
        schema: ``name(Tensor x, ...) -> Tensor``, without the namespace.
        reference: Takes the schema's arguments under the schema's names.
    """
    name = schema.split("(", 1)[0]
    _OPS[name] = Op(name, schema, reference)


def define_for_npu(schema: str, reference: Callable[..., Any]) -> None:
    """Record an op that recorded steps on an NPU call in place of several, and nothing else calls.

    Args:
        schema: As `define` takes it, of a name that begins with ``_npu_``.
        reference: As `define` takes it.
    """
    name = schema.split("(", 1)[0]
    _NPU_OPS[name] = Op(name, schema, reference)


def npu_ops() -> Mapping[str, Op]:
    """Every op that only NPUs have, by name."""
    return MappingProxyType(_NPU_OPS)


def op_named(name: str) -> Op:
    """An op of `ops` or `npu_ops`."""
    return _OPS.get(name) or _NPU_OPS[name]


def ops() -> Mapping[str, Op]:
    """Every op recorded, by name."""
    return MappingProxyType(_OPS)


def register_reference_ops() -> None:
    """Define ``torch.ops.liteboost.*`` on the reference functions, where the native library is not loaded.

    Serves every device and traces under ``torch.compile``. Like the native ops these have no backward and
    say so. Idempotent; an op that already exists, from wherever, is left alone.
    """
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    _LIBRARIES.append(library)
    for op in _OPS.values():
        if torch._C._dispatch_has_kernel(f"{NAMESPACE}::{op.name}"):
            continue
        library.define(op.schema)
        library.impl(op.name, _without_backward(op), "CompositeExplicitAutograd")


def _without_backward(op: Op) -> Callable[..., Any]:
    def implementation(*args: Any, **kwargs: Any) -> Any:
        # Only asked for under grad mode: this runs in every call of a fallback op.
        if torch.is_grad_enabled():
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    raise RuntimeError(
                        f"{NAMESPACE}::{op.name}: has no backward, but an argument requires grad and grad "
                        "mode is on; call it under torch.no_grad() or torch.inference_mode(), or use the "
                        "plain PyTorch code for training"
                    )
        return op.reference(*args, **kwargs)

    return implementation
