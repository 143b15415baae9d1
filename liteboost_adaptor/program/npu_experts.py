"""Experts in a recording on an NPU: routing in one operator, and rows put in order once for both products."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .def_use import DefUse, as_torch_casts, casts, is_npu
from .npu_routing import Routing, grouped_routings
from .passes import Step, is_slot
from .recording import Call, Recording, Slot

aten, ours = torch.ops.aten, torch.ops.liteboost
_VIEWS = (aten.view.default, aten.unsqueeze.default, aten.reshape.default)


@dataclass
class _Experts:
    """The calls that one `_npu_fused_experts` does the work of, the last of which combines.

    Attributes:
        calls: By identity.
        args: Of the new call; scores and index may be other slots yet.
    """

    calls: set[int]
    args: list[Any]


def with_fused_experts(
    calls: list[Step], recording: Recording, shapes: dict[int, torch.Tensor], returned: Iterable[int]
) -> Iterator[Step]:
    """``calls`` with one `_npu_fused_experts` for the ops of a layer's experts, where operators take them."""
    if not hasattr(ours, "_npu_fused_experts_refusal"):
        yield from calls
        return
    uses = DefUse(calls, recording, returned)
    found = {id(call): _experts_of(call, uses, shapes) for call in calls if isinstance(call, Call)}
    blocks = {which: block for which, block in found.items() if block is not None}
    routings: dict[int, Routing] = {}
    grouped = list(grouped_routings(calls, uses, shapes)) if blocks else []
    for each in blocks.values():
        chosen = _routing_of(each, uses, shapes) or _grouped_of(each, grouped, uses)
        if chosen is not None:
            routings[max(chosen.calls, key=uses.at.__getitem__)] = chosen
    gone: set[int] = set().union(*(each.calls for each in blocks.values()))
    gone = gone.union(*(each.calls for each in routings.values()))
    for call in calls:
        routing, block = routings.get(id(call)), blocks.get(id(call))
        if routing is not None:
            yield Call(routing.function, routing.args, {}, routing.results)
        elif block is not None and isinstance(call, Call):
            yield Call(ours._npu_fused_experts.default, tuple(block.args), {}, call.results)
        elif id(call) not in gone:
            yield call


def _experts_of(combine: Call, uses: DefUse, shapes: dict[int, torch.Tensor]) -> _Experts | None:
    """The experts whose results ``combine`` sums up; None where it does not, or they have another form."""
    if combine.function is not ours.experts_combine.default or combine.kwargs:
        return None
    down = uses.maker(combine.args[0], ours.experts_linear.default)
    states, views = _behind_views(down.args[0], uses) if down else (None, [])
    gated = uses.maker(states, ours.gated_activation.default)
    cut = _cut_of(gated, uses) if gated else None
    if down is None or gated is None or cut is None:
        return None
    both, in_turns, cutting = cut
    source, more = _behind_views(both, uses)
    up = uses.maker(source, ours.experts_linear.default)
    if up is None or up.args[3] != down.args[3] or up.kwargs or down.kwargs or gated.kwargs:
        return None
    form = [*gated.args[2:], *("silu", 1.0, None, 0.0)[len(gated.args) - 2 :]]
    args = [*up.args[:3], *down.args[1:3], combine.args[1], up.args[3], *form, in_turns]
    own = [up, *more, *cutting, gated, *views, down, combine]
    given = [shapes.get(value.number) if is_slot(value) else value for value in args]
    # Of tensors with symbolic sizes nothing may be asked.
    tensors = [each for value, each in zip(args, given, strict=True) if is_slot(value)]
    if not all(isinstance(each, torch.Tensor) and is_npu(each) for each in tensors):
        return None
    if not uses.is_inside(own, combine.results):
        return None
    if ours._npu_fused_experts_refusal(*given):
        return None
    return _Experts({id(call) for call in own}, args)


def _behind_views(value: Any, uses: DefUse) -> tuple[Any, list[Call]]:
    """What views show, and the views."""
    views = []
    while (view := uses.maker(value, *_VIEWS)) is not None:
        views.append(view)
        value = view.args[0]
    return value, views


def _cut_of(gated: Call, uses: DefUse) -> tuple[Any, bool, list[Call]] | None:
    """What gate and up are cut from, whether they take turns in it, and the calls that cut."""
    gate, up = gated.args[:2]
    split = uses.maker(gate, aten.split.Tensor, aten.chunk.default)
    if split is not None:
        halves = len(split.results) == 2 and [gate.number, up.number] == split.results
        is_last = len(split.args) == 3 and split.args[2] == -1
        return (split.args[0], False, [split]) if halves and is_last else None
    first, second = (uses.maker(each, aten.slice.Tensor) for each in (gate, up))
    if first is None or second is None or first.args[0] != second.args[0]:
        return None
    steps = [each.args[1:] for each in (first, second)]
    is_turns = all(len(step) == 4 and step[0] == steps[0][0] and step[3] == 2 for step in steps)
    is_whole = is_turns and [step[1] for step in steps] == [0, 1] and all(step[2] > 1 << 60 for step in steps)
    return (first.args[0], True, [first, second]) if is_whole else None


def _routing_of(block: _Experts, uses: DefUse, shapes: dict[int, torch.Tensor]) -> Routing | None:
    """How the scores and the numbers of ``block`` follow from logits; None where in another way."""
    scores, index = block.args[5], block.args[6]
    topk = uses.maker(index, aten.topk.default)
    if topk is None or topk.args[2:] not in ((), (-1,)) or topk.kwargs or topk.results[1] != index.number:
        return None
    found = _softmax_behind(scores, topk, uses) or _softmax_before(scores, topk, uses, shapes)
    if found is None:
        return None
    logits, renormalize, own = found
    x = shapes.get(logits.number)
    last = [scores.number, index.number]
    is_alone = all(id(reader) in block.calls for slot in last for reader in _outside(slot, own, uses))
    if x is None or not is_npu(x) or x.dim() != 2 or x.dtype != shapes[scores.number].dtype:
        return None
    if not is_alone or not uses.is_inside(own, last) or ours._npu_topk_softmax_refusal(x, topk.args[1]):
        return None
    args = (logits, topk.args[1], renormalize)
    return Routing({id(call) for call in own}, ours._npu_topk_softmax.default, args, last)


def _grouped_of(block: _Experts, grouped: list[tuple[Routing, list[Call]]], uses: DefUse) -> Routing | None:
    """The router of groups that ``block`` has its scores and numbers from, if nobody else reads them."""
    for routing, own in grouped:
        is_its = [value.number for value in block.args[5:7]] == routing.results
        readers = [reader for slot in routing.results for reader in _outside(slot, own, uses)]
        if is_its and all(id(reader) in block.calls for reader in readers):
            return routing
    return None


def _outside(slot: int, own: list[Call], uses: DefUse) -> list[Call]:
    return [reader for reader in uses.readers(slot) if all(reader is not call for call in own)]


def _softmax_behind(scores: Slot, topk: Call, uses: DefUse) -> tuple[Slot, bool, list[Call]] | None:
    """Of the largest logits (GPT-OSS): logits, True, and the calls."""
    softmax = uses.maker(scores, aten._softmax.default)
    if softmax is None or softmax.args[0] != Slot(topk.results[0]) or not _is_of_rows(softmax):
        return None
    return topk.args[0], True, [topk, softmax]


def _is_of_rows(softmax: Call) -> bool:
    """Whether it is one of a matrix along its rows, in its dtype."""
    return softmax.args[1] in (-1, 1) and softmax.args[2] is False and not softmax.kwargs


def _softmax_before(
    scores: Slot, topk: Call, uses: DefUse, shapes: dict[int, torch.Tensor]
) -> tuple[Slot, bool, list[Call]] | None:
    """Of all logits, perhaps divided by the sum of those that were chosen (Mixtral, Qwen3-MoE)."""
    softmax = uses.maker(topk.args[0], aten._softmax.default)
    if softmax is None or not _is_of_rows(softmax):
        return None
    own, values, logits = [softmax, topk], Slot(topk.results[0]), softmax.args[0]
    rounded = uses.maker(scores, *casts())
    if rounded is not None:
        widened = _widened(logits, uses)
        if widened is None or set(as_torch_casts(rounded).kwargs) != {"dtype"}:
            return None
        own += [widened, rounded]
        logits, scores = widened.args[0], rounded.args[0]
    divided = [call for call in uses.readers(values.number) if call.function in _DIVISIONS]
    if not divided:
        return (logits, False, own) if scores == values else None
    division = divided[0]
    total = uses.maker(division.args[1], aten.sum.dim_IntList)
    if total is None or total.kwargs or [total.args[0], *total.args[2:]] != [values, True]:
        return None
    if [*total.args[1]] not in ([-1], [1]) or division.args[0] != values:
        return None
    return (logits, True, [*own, total, division]) if scores.number in division.results else None


_DIVISIONS = (aten.div_.Tensor, aten.div.Tensor)


def _widened(value: Slot, uses: DefUse) -> Call | None:
    """The call that made fp32 of it."""
    cast = uses.maker(value, *casts())
    if cast is None or as_torch_casts(cast).kwargs != {"dtype": torch.float32}:
        return None
    return cast
