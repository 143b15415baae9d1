"""What a recording on a CPU can do with fewer operators: its threads wait for each other in each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .passes import Step, is_slot
from .recording import Call, Length, Recording

aten, ours = torch.ops.aten, torch.ops.liteboost
_VIEWS = (
    aten.view.default,
    aten.reshape.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.select.int,
    aten.slice.Tensor,
)


def share_out(recording: Recording) -> None:
    """Rewrite ``recording.calls``."""
    recording.calls = list(_with_tiles_at_once(recording.calls, recording))


def _with_tiles_at_once(calls: list[Step], recording: Recording) -> Iterator[Step]:
    """One product for the quantized layers that have one input: query, key and value; gate and up."""
    # Products of packed weights -> whether they round their input.
    packed = {ours.linear_packed.default: False, ours.linear_w4a8.default: True}
    groups: dict[int, list[Call]] = {}
    open_: dict[tuple[int, Any], list[Call]] = {}
    for call in calls:
        if not isinstance(call, Call):
            continue
        if call.function._schema.is_mutable:
            open_.clear()  # what is multiplied may be another behind it
        elif call.function in packed and _is_of_buffers(call, recording):
            group = open_.setdefault((call.args[0].number, call.function), [])
            group.append(call)
            groups[id(call)] = group
    for call in calls:
        group = groups.get(id(call), [])
        if len(group) < 2:
            yield call
        elif group[0] is call:
            lists = [[each.args[at] for each in group] for at in range(1, 6)]
            results = [each.results[0] for each in group]
            arguments = call.args[0], *lists, packed[call.function]
            yield Call(ours._linears_packed.default, arguments, {}, results, is_list=True)


def _is_of_buffers(call: Call, recording: Recording) -> bool:
    """Whether the layer can be multiplied earlier: nothing but its input is made by a call."""
    x, *layer, outputs = call.args
    known = all(value is None or _is_constant(value, recording) for value in layer)
    return known and is_slot(x) and type(outputs) is int and not call.kwargs


def _counts(*values: Any) -> bool:
    """Whether a length is among the values: what is shown may lie elsewhere in every run."""
    return any(
        isinstance(value, Length)
        or (isinstance(value, list | tuple) and _counts(*value))
        or (isinstance(value, dict) and _counts(*value.values()))
        for value in values
    )


def _is_constant(value: Any, recording: Recording) -> bool:
    return is_slot(value) and value.number in recording.constants


def plain_view(call: Call, shapes: dict[int, torch.Tensor]) -> list[int] | None:
    """Where a call only shows memory in another shape: offset, rank, sizes, strides."""
    if call.function not in _VIEWS or not is_slot(call.args[0]) or _counts(call.args, call.kwargs):
        return None
    source, result = shapes.get(call.args[0].number), shapes.get(call.results[0])
    if type(source) is not torch.Tensor or type(result) is not torch.Tensor:
        return None  # of sizes that may be others
    if source.device.type != "cpu" or not source.is_contiguous():
        return None
    if source.untyped_storage()._cdata != result.untyped_storage()._cdata:
        return None
    offset = result.storage_offset() - source.storage_offset()
    return [offset, result.dim(), *result.shape, *result.stride()]
