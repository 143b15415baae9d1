"""What a recording on an NPU can do with fewer operators, each of which costs the host a launch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from . import merged_weights
from .def_use import memories, memory_of
from .npu_attention import with_attention_in_fewer, with_whole_tables, without_joins
from .npu_experts import with_fused_experts
from .npu_integers import with_rows_of_integers
from .npu_linear_attention import with_linear_attention_in_fewer
from .npu_norms import with_weights_plus_one
from .passes import Step, is_slot, renamed, slots_read
from .recording import Appended, Call, Recording
from .tensors import writes

ours = torch.ops.liteboost
#: Operators that write, but only to what the run itself has made.
OF_A_RUN = ("liteboost::rope_", "liteboost_parallel::all_reduce_")


def merge(
    recording: Recording, shapes: dict[int, torch.Tensor], returned: Iterable[int], may_move: bool
) -> None:
    """Rewrite ``recording.calls``.

    Args:
        shapes: Slot -> a tensor of its dtype and sizes.
        returned: Slots of what a run gives.
        may_move: Whether weights may be given other memory.
    """
    calls = list(_with_linears_at_once(recording.calls, recording, shapes, may_move))
    calls = list(with_fused_experts(calls, recording, shapes, returned))
    calls = list(without_joins(calls, recording, shapes, returned))
    calls = list(with_attention_in_fewer(calls, recording, shapes, returned))
    calls = with_rows_of_integers(calls, recording, shapes, returned)
    calls = with_linear_attention_in_fewer(calls, recording, shapes, returned)
    calls = with_weights_plus_one(calls, recording, shapes)
    calls = list(with_whole_tables(calls, recording, shapes))
    recording.calls = list(_with_rope_in_place(calls, recording, shapes, returned))


def _with_linears_at_once(
    calls: list[Step], recording: Recording, shapes: dict[int, torch.Tensor], may_move: bool
) -> Iterator[Step]:
    """One product for the linear layers of one token with one input, and for gate and up of any."""
    together: dict[int, list[Call]] = {}
    open_: dict[int, list[Call]] = {}
    for call in calls:
        if not isinstance(call, Call):
            continue
        if call.function._schema.is_mutable:
            open_.clear()  # what is multiplied may be another behind it
        elif call.function is ours.linear.default and _is_of_parameters(call, recording):
            x = call.args[0].number
            if _is_one_row(shapes.get(x)):
                open_.setdefault(x, []).append(call)
                together[id(call)] = open_[x]
        elif call.function is ours.gated_linear.default and may_move:
            pairs = (
                _parameters([call.args[1], call.args[3]], recording),
                _parameters([call.args[2], call.args[4]], recording),
            )
            if pairs[0] and merged_weights.merge(pairs[0]) and pairs[1]:
                merged_weights.merge(pairs[1])
    groups = {id(group): group for group in together.values() if len(group) > 1}
    lie = {which: _lie_at_once(group, recording, may_move) for which, group in groups.items()}
    for call in calls:
        group = together.get(id(call), [])
        if not lie.get(id(group), False):
            yield call
        elif group[0] is call:
            weights, biases = [each.args[1] for each in group], [_bias(each) for each in group]
            results = [each.results[0] for each in group]
            has_bias = biases[0] is not None
            args = (call.args[0], weights, biases if has_bias else [])
            yield Call(ours._npu_linears.default, args, {}, results, is_list=True)


def _is_one_row(x: torch.Tensor | None) -> bool:
    """Whether parts of a product are contiguous: those of several rows would be copied."""
    return type(x) is torch.Tensor and x.device.type == "npu" and x.numel() == x.shape[-1]


def _is_of_parameters(call: Call, recording: Recording) -> bool:
    return (
        is_slot(call.args[0])
        and not call.kwargs
        and bool(_parameters([call.args[1]], recording))
        and (_bias(call) is None or bool(_parameters([_bias(call)], recording)))
    )


def _bias(linear: Call) -> Any:
    return linear.args[2] if len(linear.args) > 2 else None  # the dispatcher leaves defaults out


def _parameters(values: list[Any], recording: Recording) -> list[torch.Tensor]:
    """What is held for the slots; nothing where one is no constant."""
    found = []
    for value in values:
        held = recording.constants.get(value.number) if is_slot(value) else None
        if held is None:
            return []
        found.append(held)
    return found


def _lie_at_once(group: list[Call], recording: Recording, may_move: bool) -> bool:
    weights = _parameters([each.args[1] for each in group], recording)
    biases = [_bias(each) for each in group]
    many = [weights]
    if any(bias is not None for bias in biases):
        if any(bias is None for bias in biases):
            return False
        many.append(_parameters(biases, recording))
    if not all(map(merged_weights.can_merge, many)):
        return False
    if may_move:
        return all([merged_weights.merge(each) for each in many])
    return all(ours._npu_are_merged(each) for each in many)


def _with_rope_in_place(
    calls: list[Step], recording: Recording, shapes: dict[int, torch.Tensor], returned: Iterable[int]
) -> Iterator[Step]:
    """``rope_`` for a ``rope`` on an NPU whose arguments nobody reads again: one operator in place of two."""
    last = _last_reads(calls, shapes)
    others = [*recording.constants, *recording.inputs.values(), *recording.held.values(), *returned]
    of_others = memories(others, shapes)
    named: dict[int, int] = {}
    for at, call in enumerate(_renamed_by(calls, named)):
        if not (isinstance(call, Call) and call.function is ours.rope.default):
            yield call
            continue
        turned = [value.number for value in call.args[:2] if is_slot(value)]
        both = memories(turned, shapes)
        is_free = len(both) == 2 and both.isdisjoint(of_others)
        is_free = is_free and all(last[each] == at for each in both)
        if not is_free or not _is_turned_at_once(call, shapes):
            yield call
            continue
        yield replace(call, function=ours.rope_.default, results=[])
        for result, slot in zip(call.results, turned, strict=True):
            named[result] = slot
            for alias, former in recording.aliases.items():
                if former == result:
                    recording.aliases[alias] = slot
            recording.aliases[result] = slot


def _renamed_by(calls: list[Step], named: dict[int, int]) -> Iterator[Step]:
    for call in calls:
        yield renamed(call, named)


def _last_reads(calls: list[Step], shapes: dict[int, torch.Tensor]) -> dict[int, int]:
    """Storage -> the last call that reads of it; views are read by whoever reads what they show."""
    last: dict[int, int] = {}
    for at, call in enumerate(calls):
        for slot in slots_read(call):
            if slot in shapes:
                last[memory_of(shapes[slot])] = at
    return last


def _is_turned_at_once(call: Call, shapes: dict[int, torch.Tensor]) -> bool:
    refusal = getattr(ours, "_npu_rope_refusal", None)
    q, k = (shapes[value.number] for value in call.args[:2])
    if refusal is None or q.device.type != "npu" or not (q.is_contiguous() and k.is_contiguous()):
        return False
    tables = [shapes.get(value.number) if is_slot(value) else None for value in call.args[2:4]]
    return all(type(table) is torch.Tensor for table in (q, k, *tables)) and not refusal(
        q, k, *tables, *call.args[4:], **call.kwargs
    )


def with_joined_appends(
    calls: list[Step], shapes: dict[int, torch.Tensor]
) -> Iterator[Step | tuple[Appended, Appended]]:
    """The keys and values of one token together, and their scales, where places in a tensor tell them where.

    The first of the two is put off until the second, unless something reads or writes in between.
    """
    held: list[Appended] = []
    for call in calls:
        if isinstance(call, Appended):
            mate = next((each for each in held if _are_appended_at_once(each, call, shapes)), None)
            if mate is None:
                held.append(call)
            else:
                held.remove(mate)
                yield mate, call
            continue
        results = {each.result for each in held}
        if not isinstance(call, Call) or writes(call.function) or not results.isdisjoint(slots_read(call)):
            yield from held
            held = []
        yield call
    yield from held


def _are_appended_at_once(keys: Appended, values: Appended, shapes: dict[int, torch.Tensor]) -> bool:
    refusal = getattr(ours, "_npu_append_refusal", None)
    tokens = [shapes[each.new] for each in (keys, values)]
    return (
        refusal is not None
        and keys.holder == values.holder
        and all(each.dim == 2 and each.count == 1 for each in (keys, values))
        and all(token.device.type == "npu" and token.dim() == 4 for token in tokens)
        and tokens[0].dtype == tokens[1].dtype
        and not refusal(tokens[0])
    )
