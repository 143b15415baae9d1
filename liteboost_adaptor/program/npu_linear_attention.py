"""Linear attention in a recording on an NPU: parts of projections, decays and states in fewer launches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .def_use import DefUse, as_torch_casts, is_npu, memories, memory_of
from .passes import Step, is_slot, slots_read
from .recording import Call, Recording, Slot

aten, ours = torch.ops.aten, torch.ops.liteboost
#: Of one tensor, element by element.
_ELEMENTWISE = (aten._to_copy.default, aten.exp.default, aten.neg.default)


def with_linear_attention_in_fewer(
    calls: list[Step], recording: Recording, shapes: dict[int, torch.Tensor], returned: Iterable[int]
) -> list[Step]:
    """``calls`` with what linear attention launches around its rule in fewer launches."""
    if not hasattr(ours, "_npu_linears"):
        return calls
    returned = list(returned)
    calls = list(_with_parts_gathered(calls, recording, shapes, returned))
    calls = list(_with_states_in_place(calls, recording, shapes, returned))
    calls = list(_with_products_added(calls, recording, shapes, returned))
    return _with_decays_at_once(calls, recording, shapes, returned)


@dataclass
class _Row:
    """Copies of parts of one row, and where each lies in what is gathered.

    Attributes:
        source: What the row is made as.
        copies: The calls that copy, in the order in which they are gathered.
        joined: The call that puts the first of the copies into one tensor.
    """

    source: int
    copies: list[Call] = field(default_factory=list)
    joined: Call | None = None


def _with_parts_gathered(
    calls: list[Step], recording: Recording, shapes: dict[int, torch.Tensor], returned: list[int]
) -> Iterator[Step]:
    """One ``index_select`` for the copies of interleaved parts of a product of one row, and their ``cat``.

    A projection may give the parts of each key head side by side (Qwen3-Next): each kind of part is copied to
    be whole.
    """
    kept = memories([*returned, *recording.aliases, *recording.aliases.values()], shapes)
    rows = [row for row in _rows(calls, shapes, kept) if len(row.copies) > 1]
    first: dict[int, _Row] = {}
    gone: set[int] = set()
    for row in rows:
        first[id(row.copies[0])] = row
        _order(row, calls, shapes)
        gone |= {id(call) for call in [*row.copies, row.joined] if call is not None}
    for call in calls:
        if id(call) in first:
            yield from _gathered(first[id(call)], recording, shapes)
        if id(call) not in gone:
            yield call


def _rows(calls: list[Step], shapes: dict[int, torch.Tensor], kept: set[int]) -> list[_Row]:
    """The rows that products make, with copies of their parts between two calls that write."""
    found: list[_Row] = []
    open_: dict[int, _Row] = {}
    products = (ours.linear.default, ours._npu_linears.default)
    for call in calls:
        if not isinstance(call, Call) or call.function._schema.is_mutable:
            open_.clear()  # what is copied may be another behind it
        elif call.function in products:
            for slot in call.results:
                made = shapes.get(slot)
                if is_npu(made) and made.numel() == made.shape[-1] and _is_all(made):
                    open_[memory_of(made)] = _Row(slot)
        elif call.function is aten.clone.default and is_slot(call.args[0]):
            part, copied = shapes.get(call.args[0].number), shapes.get(call.results[0])
            if not is_npu(part) or not is_npu(copied) or not copied.is_contiguous():
                continue
            row = open_.get(memory_of(part))
            if row and memory_of(copied) not in kept and shapes[row.source].dtype == part.dtype:
                row.copies.append(call)
                if len(row.copies) == 2:
                    found.append(row)
    return found


def _order(row: _Row, calls: list[Step], shapes: dict[int, torch.Tensor]) -> None:
    """Gather first what is put into one tensor, as it is there."""
    by_memory = {memory_of(shapes[copy.results[0]]): copy for copy in row.copies}
    last = max(calls.index(copy) for copy in row.copies)
    for call in calls[last:]:
        if not isinstance(call, Call) or call.function._schema.is_mutable:
            return
        if call.function is not aten.cat.default:
            continue
        parts = [shapes.get(part.number) for part in call.args[0] if is_slot(part)]
        if len(parts) != len(call.args[0]) or not all(map(_is_row, parts)):
            continue
        copies = [by_memory.get(memory_of(part)) for part in parts if part is not None]
        joined = shapes.get(call.results[0])
        if None in copies or not _is_row(joined) or len({id(copy) for copy in copies}) != len(copies):
            continue
        sizes = [shapes[copy.results[0]].numel() for copy in copies if copy is not None]
        if sizes != [part.numel() for part in parts if part is not None]:
            continue
        row.joined = call
        front = [copy for copy in copies if copy is not None]
        row.copies = front + [copy for copy in row.copies if all(copy is not each for each in front)]
        return


def _gathered(row: _Row, recording: Recording, shapes: dict[int, torch.Tensor]) -> Iterator[Step]:
    source = shapes[row.source]
    places = torch.arange(source.numel())  # a product is all of its memory
    parts = [shapes[copy.args[0].number] for copy in row.copies]
    taken = [places.as_strided(part.shape, part.stride(), part.storage_offset()) for part in parts]
    index = torch.cat([each.reshape(-1) for each in taken])
    size = _block(index, source.numel())
    wanted, blocks, chosen, flat = (recording.new() for _ in range(4))
    recording.constants[wanted] = shapes[wanted] = (index[::size] // size).int().to(source.device)
    yield Call(aten.view.default, (Slot(row.source), [-1, size]), {}, [blocks])
    yield Call(aten.index_select.default, (Slot(blocks), 0, Slot(wanted)), {}, [chosen])
    yield Call(aten.view.default, (Slot(chosen), [-1]), {}, [flat])
    begin = 0
    for copy in row.copies:
        copied = shapes[copy.results[0]]
        yield from _shown(flat, begin, copied, copy.results[0], recording)
        begin += copied.numel()
    if row.joined is not None:
        yield from _shown(flat, 0, shapes[row.joined.results[0]], row.joined.results[0], recording)


def _shown(flat: int, begin: int, form: torch.Tensor, result: int, recording: Recording) -> Iterator[Step]:
    """``result``, of the shape of ``form``, as what is gathered from ``begin`` on."""
    part = recording.new()
    yield Call(aten.slice.Tensor, (Slot(flat), 0, begin, begin + form.numel()), {}, [part])
    yield Call(aten.view.default, (Slot(part), [*form.shape]), {}, [result])


def _block(index: torch.Tensor, total: int) -> int:
    """How many elements are always beside each other, at multiples of as many."""
    starts = [0, *(torch.nonzero(index[1:] != index[:-1] + 1).flatten() + 1).tolist()]
    return math.gcd(total, len(index), *starts, *index[starts].tolist())


def _with_states_in_place(
    calls: list[Step], recording: Recording, shapes: dict[int, torch.Tensor], returned: list[int]
) -> Iterator[Step]:
    """A state that is copied, updated and copied back is updated where it lies."""
    uses = DefUse(calls, recording, returned)
    served: dict[int, Call] = {}
    gone: set[int] = set()
    for call in calls:
        if not isinstance(call, Call) or call.function is not ours.recurrent_gated_delta_rule.default:
            continue
        state = call.args[5]
        copied = uses.maker(state, aten.clone.default)
        if copied is None or not is_slot(copied.args[0]) or state.number in returned:
            continue
        back = [each for each in uses.readers(state.number) if each is not call]
        held = copied.args[0]
        if len(back) == 1 and _is_copied_back(back[0], held, state):
            between = calls[uses.at[id(copied)] + 1 : uses.at[id(back[0])]]
            if _leave_alone(between, held, shapes):
                served[id(call)] = replace(call, args=(*call.args[:5], held))
                gone |= {id(copied), id(back[0])}
    for each in calls:
        if id(each) not in gone:
            yield served.get(id(each), each)


def _is_copied_back(call: Call, held: Slot, state: Slot) -> bool:
    return (
        call.function is aten.copy_.default
        and [*call.args] == [held, state]
        and call.results == [held.number]
    )


def _leave_alone(calls: list[Step], held: Slot, shapes: dict[int, torch.Tensor]) -> bool:
    """Whether nothing reads or writes what is held, or may stop the run."""
    memory = memories([held.number], shapes)
    return bool(memory) and all(
        isinstance(call, Call) and memory.isdisjoint(memories(slots_read(call), shapes)) for call in calls
    )


def _with_products_added(
    calls: list[Step], recording: Recording, shapes: dict[int, torch.Tensor], returned: list[int]
) -> Iterator[Step]:
    """``addcmul`` for a sum with a product that nobody else reads (the gate of a shared expert)."""
    uses = DefUse(calls, recording, returned)
    gone: set[int] = set()
    fused: dict[int, Call] = {}
    for call in calls:
        if not (isinstance(call, Call) and call.function is aten.add.Tensor and not call.kwargs):
            continue
        if len(call.args) != 2 or not all(map(is_slot, call.args)):
            continue
        product = uses.maker(call.args[1], aten.mul.Tensor)
        if product is None or not all(map(is_slot, product.args)):
            continue
        values = [shapes.get(each.number) for each in (call.args[0], *product.args)]
        if not all(map(is_npu, values)) or len({each.dtype for each in values if each is not None}) != 1:
            continue
        if uses.is_inside([product, call], call.results):
            gone.add(id(product))
            args = (call.args[0], *product.args)
            fused[id(call)] = Call(aten.addcmul.default, args, {}, call.results)
    for each in calls:
        if id(each) not in gone:
            yield fused.get(id(each), each)


def _with_decays_at_once(
    calls: list[Step], recording: Recording, shapes: dict[int, torch.Tensor], returned: list[int]
) -> list[Step]:
    """What all layers make of vectors of theirs in one way (``-exp(A_log)``) is made once a step for all.

    Made in each step, because a weight may change between two.
    """
    uses = DefUse(calls, recording, returned)
    writing = [call for call in calls if isinstance(call, Call) and call.function._schema.is_mutable]
    written = memories([slot for call in writing for slot in slots_read(call)], shapes)
    alike: dict[str, list[list[Call]]] = {}
    for slot, vector in recording.constants.items():
        if not is_npu(vector) or vector.dim() != 1 or memory_of(vector) in written:
            continue
        chain = _chain(slot, uses)
        if len(chain) > 1:
            does = [(str(call.function), call.args[1:], call.kwargs) for call in chain]
            alike.setdefault(f"{vector.dtype} {vector.device} {does}", []).append(chain)
    made: list[Step] = []
    gone: set[int] = set()
    for chains in alike.values():
        if len(chains) < 2:
            continue
        sizes = [recording.constants[chain[0].args[0].number].shape[0] for chain in chains]
        now = recording.new()
        made.append(Call(aten.cat.default, ([chain[0].args[0] for chain in chains],), {}, [now]))
        for call in chains[0]:
            made.append(replace(call, args=(Slot(now), *call.args[1:]), results=[now := recording.new()]))
        results = [chain[-1].results[0] for chain in chains]
        made.append(Call(aten.split_with_sizes.default, (Slot(now), sizes), {}, results, is_list=True))
        gone |= {id(call) for chain in chains for call in chain}
    return [*made, *(call for call in calls if id(call) not in gone)]


def _chain(slot: int, uses: DefUse) -> list[Call]:
    """What is made of a constant element by element, by calls each the only reader of what is before it."""
    chain: list[Call] = []
    while len(readers := uses.readers(slot)) == 1 and as_torch_casts(readers[0]).function in _ELEMENTWISE:
        chain.append(readers[0])
        slot = readers[0].results[0]
    while chain and not uses.is_inside(chain, chain[-1].results):
        chain.pop()
    return chain


def _is_row(tensor: Any) -> bool:
    return is_npu(tensor) and tensor.is_contiguous() and max(tensor.shape, default=0) == tensor.numel()


def _is_all(tensor: torch.Tensor) -> bool:
    """Whether it begins where its memory does, one element beside the other."""
    return tensor.is_contiguous() and tensor.storage_offset() == 0
