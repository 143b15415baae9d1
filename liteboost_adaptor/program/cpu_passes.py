"""What a recording on a CPU can do with fewer operators: its threads wait for each other in each."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

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
    recording.calls = list(_with_layers_at_once(recording.calls, recording))


def _with_layers_at_once(calls: list[Step], recording: Recording) -> Iterator[Step]:
    """One product for the layers on a CPU that have one input: query, key and value; gate and up."""
    groups: dict[int, list[Call]] = {}
    open_: dict[tuple[int, Any], list[Call]] = {}
    for call in calls:
        if not isinstance(call, Call):
            continue
        if call.function._schema.is_mutable:
            open_.clear()  # what is multiplied may be another behind it
        elif call.function in _at_once() and _is_of_buffers(call, recording):
            group = open_.setdefault((call.args[0].number, call.function), [])
            group.append(call)
            groups[id(call)] = group
    for call in calls:
        group = groups.get(id(call), [])
        if len(group) < 2:
            yield call
        elif group[0] is call:
            product = _at_once()[call.function]
            layers = [(*each.args[1:], *[None] * product.arguments)[: product.arguments] for each in group]
            lists = [list(values) for values in zip(*layers, strict=True)]
            results = [each.results[0] for each in group]
            yield Call(product.function, (call.args[0], *lists, *product.more), {}, results, is_list=True)


class _Product(NamedTuple):
    """A product of several layers: behind their input it is given so many lists, and ``more``."""

    function: Any
    arguments: int
    more: tuple[bool, ...] = ()


@functools.cache
def _at_once() -> dict[Any, _Product]:
    """Product of one layer -> that of several."""
    return {
        ours.linear.default: _Product(ours._linears.default, 2),
        ours.linear_w8a8.default: _Product(ours._linears_w8a8.default, 3),
        ours.linear_packed.default: _Product(ours._linears_packed.default, 5, (False,)),
        ours.linear_w4a8.default: _Product(ours._linears_packed.default, 5, (True,)),
    }


def _is_of_buffers(call: Call, recording: Recording) -> bool:
    """Whether the layer, of a CPU, can be multiplied earlier: nothing but its input is made by a call."""
    x, weight, *rest = call.args
    known = all(value is None or type(value) is int or _is_constant(value, recording) for value in rest)
    if not known or call.kwargs or not is_slot(x) or not _is_constant(weight, recording):
        return False
    return recording.constants[weight.number].device.type == "cpu"


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
