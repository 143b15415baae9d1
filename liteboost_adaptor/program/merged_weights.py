"""Weights that are multiplied by one input, brought to lie one behind the other on an NPU.

Each parameter stays the object it was, with its values and with a storage of its own, over a part of one
allocation: nothing that copies, saves or looks for shared weights sees a difference. Where linear layers find
their weights so, by address and at every call, they are one product. Whatever gives a parameter other memory
(``.to()``, ``p.data = ``, ``load_state_dict(assign=True)``) separates it, and each is multiplied by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..eligibility import is_plain_type
from ..replacements import npu_format

ours = torch.ops.liteboost
#: Parameters that were moved, with the address: they belong to others while they lie there.
_moved: WeakIdKeyDictionary = WeakIdKeyDictionary()


def merge(parameters: Sequence[torch.Tensor]) -> bool:
    """Bring what `can_merge` there; whether it lies so."""
    if not can_merge(parameters):
        return False
    if ours._npu_are_merged(list(parameters)):
        return True
    with torch.no_grad():
        parts = ours._npu_merge([parameter.data for parameter in parameters])
        # Other streams will read them, none of which waits for this one.
        torch.get_device_module(parts[0].device).current_stream(parts[0].device).synchronize()
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.data = part
            _moved[parameter] = part.data_ptr()
    return bool(ours._npu_are_merged(list(parameters)))


def can_merge(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether these are parameters, or copies of them, whose memory nobody else has any claim to."""
    if not hasattr(ours, "_npu_merge") or len({id(each) for each in parameters}) != len(parameters):
        return False
    first = parameters[0]
    if any(not _is_movable(each) or each.dtype != first.dtype for each in parameters):
        return False
    if any(each.shape[1:] != first.shape[1:] or each.device != first.device for each in parameters):
        return False
    if ours._npu_are_merged(list(parameters)):
        return True
    return all(_moved.get(each) != each.data_ptr() and not _is_seen(each) for each in parameters)


def _is_movable(tensor: torch.Tensor) -> bool:
    return (
        (is_plain_type(type(tensor)) and isinstance(tensor, torch.nn.Parameter))
        and tensor.device.type == "npu"
        and not tensor.is_inference()
        and tensor.is_contiguous()
        and tensor.numel() * tensor.element_size() % 32 == 0
        and tensor.storage_offset() == 0
        and tensor.numel() > 0
        and npu_format.format_of(tensor) == npu_format.ND
    )


def _is_seen(tensor: torch.Tensor) -> bool:
    """Whether any other tensor shows the memory of this one."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    storage = tensor.untyped_storage()
    # Users: the parameter, and the object that Python has of the storage. That one is held by the storage,
    # named here, and handed to what counts.
    return count is None or count(storage._cdata) > 2 or sys.getrefcount(storage) > 3
