"""What is known of operators: whether they draw, and whether values decide how large their results are."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._library.utils import has_fake_kernel

from .recording import is_foreign

_DYNAMIC = torch.Tag.dynamic_output_shape
#: Sized by values where an index is of booleans.
_INDEXING = (torch.ops.aten.index, torch.ops.aten._unsafe_index)


def drops_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether it is random only where it drops something out, and does not."""
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return False
    at = names.index("dropout_p")
    given = args[at] if at < len(args) else kwargs.get("dropout_p", func._schema.arguments[at].default_value)
    return given == 0


def is_sized_by_values(func: Any, args: Any) -> bool:
    """Whether values decide how large a result is."""
    if func.overloadpacket not in _INDEXING:
        return _is_dynamic(func)
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


@functools.cache
def _is_dynamic(func: Any) -> bool:
    """Whether an operator says so, or the one that it is a variant of, which writes to ``out``."""
    packet = func.overloadpacket
    # `torch.Tag.out` would say so, from torch 2.12 on.
    writes_out = any(argument.is_out for argument in func._schema.arguments)
    said = [getattr(packet, name) for name in packet.overloads()] if writes_out else [func]
    return any(_DYNAMIC in each.tags for each in said)


def is_sized_unseen(func: Any, outputs: Any) -> bool:
    """Whether nothing tells that the values of arguments do not decide how large ``outputs`` are."""
    made = [one for one in outputs if isinstance(one, torch.Tensor)]
    if any(one.layout != torch.strided for one in made):
        return True  # of as many values as are not zero
    return bool(made) and is_foreign(func) and not has_fake_kernel(func)


def is_composite(func: torch._ops.OpOverload) -> bool:
    """Whether torch makes it of other operators on every device."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
