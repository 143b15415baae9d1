"""Attention in a recording on an NPU: masks, softcaps and tables as fewest operators take them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from .def_use import DefUse
from .passes import Step, is_slot, renamed
from .recording import Call, Recording, Slot

aten, ours = torch.ops.aten, torch.ops.liteboost
#: is_causal, sliding_window, softcap and sinks of a call of attention that leaves them out.
_DEFAULTS: list[Any] = [False, 0, 0.0, None]


def with_attention_in_fewer(
    calls: list[Step], recording: Recording, shapes: dict[int, torch.Tensor], returned: Iterable[int]
) -> Iterator[Step]:
    """``calls`` with attention of one query as fewer operators take it.

    Beside sinks a mask that adds nothing or the lowest number is the bool mask it was made of: the sink,
    which no mask hides, leaves nothing of what has the lowest number, whether a row sees a key or none.
    A softcap is `_npu_softcap_attention`, where there is no mask or such a one, which has no infinities.
    """
    uses = DefUse(calls, recording, returned)
    for call in calls:
        yield _in_fewer(call, uses, shapes) if isinstance(call, Call) else call


def _in_fewer(call: Call, uses: DefUse, shapes: dict[int, torch.Tensor]) -> Call:
    if call.function is not ours.attention.default or call.kwargs or not is_slot(call.args[0]):
        return call
    query, key, value, mask, scaling, *options = call.args
    given = shapes.get(query.number)
    is_one = type(given) is torch.Tensor and given.device.type == "npu" and given.shape[2] == 1
    is_causal, window, softcap, sinks = [*options, *_DEFAULTS[len(options) :]]
    if not is_one or given is None or is_causal or window:
        return call
    seen = _seen_of(mask, given.dtype, uses, shapes) if is_slot(mask) else None
    if is_slot(sinks) and seen is not None and not softcap and shapes[sinks.number].dim() == 1:
        return replace(call, args=(query, key, value, seen, scaling, False, 0, 0.0, sinks))
    has_op = hasattr(ours, "_npu_softcap_attention")
    if softcap and sinks is None and has_op and (mask is None or seen is not None):
        args = (query, key, value, mask, scaling, softcap)
        return replace(call, function=ours._npu_softcap_attention.default, args=args)
    return call


def _seen_of(mask: Slot, dtype: torch.dtype, uses: DefUse, shapes: dict[int, torch.Tensor]) -> Slot | None:
    """The bool mask of all heads that an added one was made of: 0 where true, the lowest number elsewhere."""
    made = uses.maker(mask, aten.where.self)
    if made is None or made.kwargs or not all(map(is_slot, made.args)):
        return None
    seen, nothing, lowest = made.args
    zeros = uses.maker(nothing, aten.zeros.default)
    number = uses.maker(lowest, aten.scalar_tensor.default)
    is_lowest = number is not None and number.args[0] == torch.finfo(dtype).min
    is_plain = zeros is not None and is_lowest and shapes[mask.number].dtype == dtype
    form = shapes[seen.number]
    return seen if is_plain and form.dtype == torch.bool and form.dim() == 4 and form.shape[1] == 1 else None


def without_joins(
    calls: list[Step], recording: Recording, shapes: dict[int, torch.Tensor], returned: Iterable[int]
) -> Iterator[Step]:
    """``calls`` without tensors that are joined only to be split again: a query of latent attention."""
    kept = {*returned}
    uses = DefUse(calls, recording, kept)
    gone: set[int] = set()
    parts: dict[int, int] = {}
    for call in calls:
        if not isinstance(call, Call) or call.function is not aten.split_with_sizes.default:
            continue
        join = uses.maker(call.args[0], aten.cat.default)
        if join is None or kept.intersection(call.results) or not _are_its_parts(join, call, shapes):
            continue
        # Our ops take tensors that lie in memory in any way.
        readers = [each for slot in call.results for each in uses.readers(slot)]
        are_ours = all(each.function.namespace == "liteboost" for each in readers)
        is_alone = uses.is_inside([join, call], call.results) and uses.is_unwritten(join, call.results)
        if are_ours and is_alone:
            gone |= {id(join), id(call)}
            parts |= {slot: part.number for slot, part in zip(call.results, join.args[0], strict=True)}
    for call in calls:
        if id(call) not in gone:
            yield renamed(call, parts)


def _are_its_parts(join: Call, split: Call, shapes: dict[int, torch.Tensor]) -> bool:
    """Whether what ``split`` gives is what was joined along the last dimension."""
    joined, *dim = join.args
    if dim != [-1] or [*split.args[2:]] != [-1] or join.kwargs or split.kwargs:
        return False
    if not all(map(is_slot, joined)) or len(joined) != len(split.args[1]):
        return False
    sizes = [shapes[part.number].shape[-1] for part in joined]
    return all(type(size) is int for size in sizes) and sizes == [*split.args[1]]


def with_whole_tables(
    calls: list[Step], recording: Recording, shapes: dict[int, torch.Tensor]
) -> Iterator[Step]:
    """Tables of half a head's angles made whole once for all layers: only such are turned by in place."""
    whole: dict[int, Slot] = {}
    for call in calls:
        if not (isinstance(call, Call) and call.function is ours.rope.default and _has_halves(call, shapes)):
            yield call
            continue
        for table in call.args[2:4]:
            if table.number not in whole:
                made = whole[table.number] = Slot(recording.new())
                shapes[made.number] = torch.cat([shapes[table.number]] * 2, -1)
                yield Call(aten.cat.default, ([table, table], -1), {}, [made.number])
        tables = [whole[table.number] for table in call.args[2:4]]
        yield replace(call, args=(*call.args[:2], *tables, *call.args[4:]))


def _has_halves(rope: Call, shapes: dict[int, torch.Tensor]) -> bool:
    tables: list[Any] = [shapes.get(each.number) if is_slot(each) else None for each in rope.args[2:4]]
    if rope.kwargs or len(rope.args) != 7 or rope.args[5] != "half":
        return False
    return all(
        type(each) is torch.Tensor and each.device.type == "npu" and 2 * each.shape[-1] == rope.args[6]
        for each in tables
    )
