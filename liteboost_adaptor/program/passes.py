"""What a recording can do with fewer operators: the same values, bit for bit."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch

from .recording import Appended, Call, Expected, Recording, Slot

Step = Call | Appended | Expected
aten, ours = torch.ops.aten, torch.ops.liteboost
_ALIASES = (aten.alias.default, aten.detach.default)


def improve(recording: Recording, shapes: dict[int, torch.Tensor], returned: Collection[int]) -> None:
    """Rewrite ``recording.calls``.

    Args:
        shapes: Slot -> a tensor of its dtype and sizes.
        returned: Slots of what a run gives.
    """
    calls = list(_without_aliases(recording, returned))
    recording.calls = list(_with_fused_norms(calls, recording, shapes))


def _without_aliases(recording: Recording, returned: Collection[int]) -> Iterator[Step]:
    """Another tensor object for the same memory is the same slot to a program, which has no objects.

    But who gets both may give one another form, or attributes, or finds a parameter in place of its values.
    """
    for noted in recording.calls:
        call = renamed(noted, recording.aliases)
        if isinstance(call, Call) and call.function in _ALIASES and call.results[0] not in returned:
            recording.aliases[call.results[0]] = call.args[0].number
        else:
            yield call


def renamed(call: Step, named: dict[int, int]) -> Step:
    if isinstance(call, Call):
        args, kwargs = _mapped(call.args, named), _mapped(call.kwargs, named)
        return replace(call, args=args, kwargs=kwargs)
    if isinstance(call, Appended):
        return replace(call, new=named.get(call.new, call.new))
    return replace(call, slot=named.get(call.slot, call.slot))


def _mapped(value: Any, named: dict[int, int]) -> Any:
    if isinstance(value, Slot):
        return Slot(named.get(value.number, value.number))
    if isinstance(value, list | tuple):
        return type(value)(_mapped(each, named) for each in value)
    if isinstance(value, dict):
        return {name: _mapped(each, named) for name, each in value.items()}
    return value


def _with_fused_norms(
    calls: list[Step], recording: Recording, shapes: dict[int, torch.Tensor]
) -> Iterator[Step]:
    """``add_rms_norm`` for a sum and the ``rms_norm`` of it, also where they are in different modules."""
    sums: dict[int, Call] = {}
    norms: dict[int, Call] = {}
    fused: set[int] = set()
    for call in calls:
        if not isinstance(call, Call):
            continue
        if call.function._schema.is_mutable:
            sums.clear()  # what is added may be another at the norm
        elif _is_plain_sum(call, shapes):
            sums[call.results[0]] = call
        elif call.function is ours.rms_norm.default and is_slot(call.args[0]):
            found = sums.pop(call.args[0].number, None)
            if found is not None and _weight_is_there(call, recording):
                norms[id(found)] = call
                fused.add(id(call))
    for call in calls:
        norm = norms.get(id(call))
        if norm is not None and isinstance(call, Call):
            args, results = (*call.args, *norm.args[1:]), [norm.results[0], call.results[0]]
            yield Call(ours.add_rms_norm.default, args, norm.kwargs, results)
        elif id(call) not in fused:
            yield call


def is_slot(value: Any) -> bool:
    return isinstance(value, Slot)


def _is_plain_sum(call: Call, shapes: dict[int, torch.Tensor]) -> bool:
    """Whether it adds two tensors of one shape and dtype."""
    if call.function is not aten.add.Tensor or call.kwargs or not all(map(is_slot, call.args)):
        return False
    added = [shapes[value.number] for value in call.args]
    # As text: to compare symbols would be one more condition.
    return added[0].dtype == added[1].dtype and str([*added[0].shape]) == str([*added[1].shape])


def _weight_is_there(norm: Call, recording: Recording) -> bool:
    """Whether the norm can be made where the sum is: its weight is nothing that a call makes."""
    weight = recording.constants.get(norm.args[1].number) if is_slot(norm.args[1]) else None
    return weight is not None and weight.dim() == 1


def slots_read(call: Step) -> set[int]:
    """The tensors a call is given."""
    match call:
        case Call():
            return _slots_in([*call.args, *call.kwargs.values()])
        case Appended():
            return {call.new}
        case Expected():
            return {call.slot}


def _slots_in(values: Any) -> set[int]:
    found = set()
    for value in values:
        if isinstance(value, Slot):
            found.add(value.number)
        elif isinstance(value, list | tuple):
            found |= _slots_in(value)
    return found
