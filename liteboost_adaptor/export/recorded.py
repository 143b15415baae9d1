"""One recorded call: a program, what it is given and what it leaves in the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ExportError
from ..program.attempt import Attempt
from ..program.cache_state import CacheDict, cache_dicts
from ..program.program import written_to
from ..program.recording import Expected, Length, Place, Slot
from . import arguments

#: What a cache keeps, by name (`entry_name`): of a tensor its sizes, else the value.
State = dict[str, Any]
#: The result that a runner chooses the next token by.
_LOGITS = "the result.logits"
#: Lines of a program for graphs of a device.
_OF_GRAPHS = ("phases", "statics", "fixed", "copied")


@dataclass(frozen=True)
class Number:
    """What a number that a run is given is the value of.

    Attributes:
        kind: ``length`` or ``capacity`` of the entry ``name`` along ``dim``, the ``number`` of that name
            which the cache keeps, or ``input``: the size of the argument ``name`` along ``dim``.
    """

    kind: str
    name: str
    dim: int

    def of(self, state: State, seen: int, count: int, capacity: int) -> int:
        """Its value for a call of ``count`` tokens behind ``seen``."""
        match self.kind:
            case "input":
                return arguments.size(self.name, self.dim, seen, count)
            case "capacity":
                return capacity
            case "length":
                return state[self.name][self.dim]
        return state[self.name]


@dataclass(frozen=True)
class Recorded:
    """A program for one kind of calls.

    Attributes:
        text: As ``kernels/program/program.h`` says.
        constants: The tensors it holds, in order.
        arguments: Names of what a run is given first.
        kept: What of the cache it is given next.
        appended: Those of `kept` that are appended to in place, in the order in which it is given their
            memory and, behind `numbers`, how far that is written -> along which dimension.
        numbers: What it is given.
        results: How many results come before what the cache keeps.
        logits: Which of them holds these.
        returned: What the others are in the cache -> of which dtype.
    """

    text: str
    constants: list[torch.Tensor]
    arguments: list[str]
    kept: list[str]
    appended: dict[str, int]
    numbers: list[Number]
    results: int
    logits: int
    returned: dict[str, torch.dtype]
    _others: list[tuple[int, Number]]
    _holds: Callable[..., bool]
    _count: int | None
    _given: dict[str, tuple[int | None, ...]]
    _fixed: State
    _after: State
    _computed: Callable[..., tuple[int, ...]]

    def values(self, state: State, seen: int, count: int, capacity: int) -> list[int] | None:
        """The values of `numbers`, or ``None`` where the program is not right for such a call."""
        if self._count not in (None, count):
            return None
        for name, sizes in self._given.items():
            found = state.get(name)
            if type(found) is not tuple or len(found) != len(sizes):
                return None
            if any(size not in (None, is_) for size, is_ in zip(sizes, found, strict=True)):
                return None
        if any(state.get(name) != value for name, value in self._fixed.items()):
            return None
        values = [number.of(state, seen, count, capacity) for number in self.numbers]
        if any(number.of(state, seen, count, capacity) != values[at] for at, number in self._others):
            return None
        return values if self._holds(*values) else None

    def after(self, state: State, values: list[int]) -> State:
        """What the cache keeps behind a run with ``values``."""
        computed = iter(self._computed(*values))

        def known(value: Any) -> Any:
            if type(value) is tuple:
                return tuple(known(each) for each in value)
            return next(computed) if isinstance(value, Length) else value

        return state | {name: known(value) for name, value in self._after.items()}


def state_of(cache: Any) -> State:
    """What ``cache`` keeps now."""
    return {
        entry_name(holder, name): tuple(value.shape) if isinstance(value, torch.Tensor) else value
        for holder in cache_dicts(cache.layers)
        for name, value in holder.of(cache.layers).items()
        if isinstance(value, torch.Tensor | int)
    }


def entry_name(holder: CacheDict, name: Any) -> str:
    """What a folder calls ``name`` of a layer, or of a dict that a layer keeps."""
    return ".".join([str(holder.layer), *([holder.attribute] if holder.attribute else []), str(name)])


def recorded(attempt: Attempt, count: int | None) -> Recorded:
    """What ``attempt``, which has run, has recorded.

    Args:
        count: The number of tokens it is right for; ``None``: any that its conditions allow.

    Raises:
        ExportError: It decides by values, or writes to what is no part of the cache.
        CannotLower: A program has no instruction for something.
    """
    recorder, recording = attempt.recorder, attempt.recorder.recording
    if any(isinstance(call, Expected) for call in recording.calls):
        raise ExportError("decides by a value of a tensor, which may be another for other tokens")
    constants, _, inputs = written_to(recorder)
    if constants or inputs or recorder.requirements:
        raise ExportError("writes to a tensor that is no part of the cache, or reads where one lies")
    names = attempt.outline.names
    if _LOGITS not in names:
        raise ExportError("returns no logits")
    results = len(names)
    writer, shapes = attempt.writer(False), recorder.shapes()

    def name(key: tuple[int, Any]) -> str:
        return entry_name(attempt.held_by[key[0]], key[1])

    def number(place: Place) -> Number:
        named = place.name if place.kind == "input" else name((place.holder, place.name))
        return Number(place.kind, named, place.dim)

    places = [(at, number(place)) for at, place in recorder.symbols.places]
    first = {at: each for at, each in reversed(places)}
    counting = {each.name for _, each in places if each.kind == "number"}
    before = {
        name((at, each)): value for at, own in enumerate(recorder.before) for each, value in own.items()
    }
    after = {name(key): _sizes(value, shapes) for key, value in recorder.changed.items()}
    return Recorded(
        text="\n".join(line for line in writer.text().splitlines() if line.split(" ")[0] not in _OF_GRAPHS),
        constants=writer.constants,
        arguments=writer.arguments,
        kept=[name(key) for key in writer.kept],
        appended={name(key): call.dim for key, call in writer.appended.items()},
        numbers=[first[at] for at in sorted(first)],
        results=results,
        logits=names.index(_LOGITS),
        returned={name(key): shapes[recorder.changed[key].number].dtype for key in writer.returned},
        _others=places,
        _holds=recorder.symbols.conditions(),
        _count=count,
        _given={
            name(key): tuple(_number_or_none(size) for size in recording.tensors[recording.held[key]].shape)
            for key in writer.kept
        },
        _fixed={
            each: value
            for each, value in before.items()
            if type(value) in (bool, int) and each not in counting
        },
        _after=after,
        _computed=recorder.symbols.expressions(
            [length for value in after.values() for length in _lengths(value)]
        ),
    )


def _sizes(value: Any, shapes: dict[int, torch.Tensor]) -> Any:
    """Of a tensor its sizes, with a `Length` where one is computed."""
    if not isinstance(value, Slot):
        return value
    return tuple(
        Length(size.node._expr) if isinstance(size, torch.SymInt) else size
        for size in shapes[value.number].shape
    )


def _lengths(value: Any) -> list[Length]:
    found = value if type(value) is tuple else (value,)
    return [each for each in found if isinstance(each, Length)]


def _number_or_none(size: Any) -> int | None:
    return size if type(size) is int else None
