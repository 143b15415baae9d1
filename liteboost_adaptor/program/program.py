"""One recorded step, loaded: where its inputs come from, and what it does to a cache."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..kv_cache import buffers
from ..report import CallCounter
from . import reasons
from .cache_state import CacheDict
from .caches import PARTS, parts
from .graph import Graph
from .lower import Writer
from .phases import COLLECTIVES
from .recording import Call, CannotLower, Expected, Length, Place, Slot, is_foreign
from .result import Outline
from .state import State, is_same
from .tensors import set_version, storage, version

if TYPE_CHECKING:
    from .record import Recorder

ops = torch.ops.liteboost
#: Runs that may stop before it is asked how many did not.
_STOPS = 8
#: Kinds of places that hold numbers, which no tensor tells.
_OF_PYTHON = ("number", "argument")


class Program:
    """A step as a program of ``kernels/program``, for caches that are laid out as the recorded one.

    Attributes:
        state: What it was recorded in.
        runs: Steps it has served.
        stops: Runs that raised or stopped, see `reasons.STOPS`.
        decides: Whether there may be such runs.
        outline: Of its result.
        is_made_once: Whether no second run beside it may be made: ranks exchange something in it, or an
            operator that is neither torch's nor ours may keep something.
        number: Of what C++ has loaded.
        graph: The program as a graph of its device, once one was made.
        graph_fault: Why none can be, or an empty string.
    """

    def __init__(
        self,
        writer: Writer,
        recorder: Recorder,
        cache: Any,
        held_by: list[CacheDict],
        outline: Outline,
        state: State,
        counts: Mapping[CallCounter, int],
    ) -> None:
        self.state, self.runs, self.stops = state, 0, 0
        self.number = ops._program_load(writer.text(), writer.constants)
        self._finalizer = weakref.finalize(self, ops._program_unload, self.number)
        self.graph: Graph | None = None
        self.graph_fault = writer.phases.fault
        self._holds = recorder.symbols.conditions()
        self._requirements = recorder.requirements
        self._first, self._others = _first_places(recorder.symbols.places)
        self._arguments, self._kept = writer.arguments, writer.kept
        self._appended = list(writer.appended)
        added = [call.count for call in writer.appended.values()]
        #: How many positions are appended, or how that follows from the symbols.
        self._added = [count for count in added if not isinstance(count, Length)]
        grows = len(self._added) < len(added)
        self._added_of = recorder.symbols.expressions(added) if grows else None
        self.outline, self._count = outline, len(outline.tensors)
        outline.tensors = []
        self._returned = writer.returned
        self._set = {key: value for key, value in recorder.changed.items() if not isinstance(value, Slot)}
        lengths: list[Length | int] = [each for each in self._set.values() if isinstance(each, Length)]
        self._computed = recorder.symbols.expressions(lengths)
        self._types = list(map(type, parts(cache)))
        self._holders = held_by
        self._fixed = _fixed_attributes(cache, recorder)
        # Only code that has to be read could tell 1 from True.
        self._is_same = is_same if state.has_read else operator.eq
        self._counts = list(counts.items())
        self._writes = written_to(recorder)
        self._versions = _versions(recorder, self._writes)
        self.decides = any(isinstance(call, Expected) for call in recorder.recording.calls)
        self.is_made_once = any(
            isinstance(call, Call) and (call.function.namespace in COLLECTIVES or is_foreign(call.function))
            for call in recorder.recording.calls
        )
        # With what is read, all that holders keep: another attribute makes one more.
        read = {*self._kept, *self._appended}
        self._unread = [key for key in recorder.recording.held if key not in read]

    @property
    def is_closed(self) -> bool:
        """Whether it runs no more."""
        return not self._finalizer.alive

    @property
    def is_vain(self) -> bool:
        """Whether most runs have stopped: they cost more than the others save."""
        return self.stops > _STOPS + self.runs

    @property
    def writes_to_arguments(self) -> bool:
        """Whether a run writes to an argument: it has to be given the caller's own."""
        return bool(self._writes[2])

    def close(self) -> None:
        """Let go of the tensors it holds; it runs no more."""
        if self.graph is not None:
            self.graph.close()
        self._finalizer()

    def writes(self, cache: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """What was there before a run and is written to by it, beside what it appends."""
        constants, held, inputs = self._writes
        if not (constants or held or inputs):
            return []
        kept_by = parts(cache)
        owns = [holder.of(kept_by) for holder in self._holders]
        return [*constants, *(owns[at][name] for at, name in held), *(kwargs[name] for name in inputs)]

    def symbols(self, cache: Any, kwargs: dict[str, Any]) -> list[int] | None:
        """The values of the symbols for ``cache``, or ``None`` where this program is not right for it."""
        try:
            kept_by = parts(cache)
            if list(map(type, kept_by)) != self._types or len(set(map(id, kept_by))) != len(kept_by):
                return None
            owns = [holder.of(kept_by) for holder in self._holders]
            for at, count, names, values in self._fixed:
                own = owns[at] if at >= 0 else vars(cache)
                if len(own) != count or (names is not None and not self._is_same(names(own), values)):
                    return None
            for at, name in self._unread:
                if name not in owns[at]:
                    return None
            symbols = [_value_at(place, owns, kwargs) for place in self._first]
            for index, place in self._others:
                if _value_at(place, owns, kwargs) != symbols[index]:
                    return None
        except (KeyError, AttributeError, IndexError, TypeError):
            return None  # the cache keeps something else
        if not all([holds(kwargs[name]) for name, holds in self._requirements]):
            return None
        try:
            return symbols if self._holds(*symbols) else None
        except ArithmeticError:
            return None  # it would divide by zero, where the original may not

    def run(
        self, cache: Any, kwargs: dict[str, Any], symbols: list[int], graph: Graph | None = None
    ) -> Run | str:
        """What a call would give and do to ``cache``, which is not changed yet; or why the program stopped.

        With ``graph``, its own, that is replayed.
        """
        if self.is_closed:
            return reasons.CHANGED
        kept_by = parts(cache)
        inputs = [kwargs[name] for name in self._arguments]
        try:
            owns = [holder.of(kept_by) for holder in self._holders]
            inputs += [owns[holder][name] for holder, name in self._kept]
            grown = [owns[holder][buffers.BUFFERS][name] for holder, name in self._appended]
            inputs += [buffer.memory for buffer in grown]
            sizes = symbols + [buffer.end for buffer in grown]
        except (KeyError, AttributeError):
            return reasons.OTHER_CACHE
        results = graph.run(inputs, sizes) if graph else ops._program_run(self.number, inputs, sizes)
        if not results:
            self.stops += 1
            return reasons.STOPS[ops._program_stopped_by()]
        if any(self._versions):
            for tensor, count in zip(self.writes(cache, kwargs), self._versions, strict=True):
                set_version(tensor, version(tensor) + count)
        values = iter(self._computed(*symbols)) if self._set else iter(())
        numbers = {key: next(values) if isinstance(each, Length) else each for key, each in self._set.items()}
        kept = dict(zip(self._returned, results[self._count :], strict=True))
        added = self._added if self._added_of is None else self._added_of(*symbols)
        appended = list(zip(self._appended, grown, added, strict=True))
        return Run(owns, results[: self._count], kept, numbers, appended)

    def commit(self, run: Run, cache: Any) -> Any:
        """The result of the call, with what it does to ``cache``."""
        for _, buffer, count in run.appended:
            buffer.extend_to(buffer.end + count)
        for (holder, name), value in (*run.kept.items(), *run.numbers.items()):
            run.owns[holder][name] = value
        for counter, calls in self._counts:
            counter.calls += calls
        return self.outline.built(cache, run.results)


@dataclass
class Run:
    """What a program gave, before any of it is seen.

    Attributes:
        owns: What keeps the tensors of the cache.
        results: The tensors of the result.
        kept: (holder, name) -> the tensor that is to be kept so.
        numbers: The same of numbers and other plain values.
        appended: ((holder, name), buffer, count): behind the buffer's end lie ``count`` positions more.
    """

    owns: list[dict[Any, Any]]
    results: list[torch.Tensor]
    kept: dict[tuple[int, Any], torch.Tensor]
    numbers: dict[tuple[int, Any], Any]
    appended: list[tuple[tuple[int, str], buffers.KVBuffer, int]]


def written_to(recorder: Recorder) -> tuple[list[torch.Tensor], list[tuple[int, Any]], list[str]]:
    """Constants, what holders keep and arguments that show memory which the step has written to."""
    written = {tensor.untyped_storage()._cdata for tensor in recorder.written.tensors}
    recording = recorder.recording

    def is_written(slot: int) -> bool:
        tensor = recorder.real(recording.tensors[slot])
        return tensor.layout == torch.strided and tensor.untyped_storage()._cdata in written

    if not written:
        return [], [], []
    constants = [
        each
        for each in recording.constants.values()
        if each.layout == torch.strided and each.untyped_storage()._cdata in written
    ]
    held = [key for key, slot in recording.held.items() if is_written(slot)]
    return constants, held, [name for name, slot in recording.inputs.items() if is_written(slot)]


def _versions(
    recorder: Recorder, written: tuple[list[torch.Tensor], list[tuple[int, Any]], list[str]]
) -> list[int]:
    """By how much the step has raised the version of each of these; memory that several show counts once."""
    counts, recording = recorder.written.counts(), recorder.recording
    constants, held, inputs = written
    slots = [*(recording.held[key] for key in held), *(recording.inputs[name] for name in inputs)]
    tensors = [*constants, *(recorder.real(recording.tensors[slot]) for slot in slots)]
    return [counts.pop(storage(each), 0) for each in tensors]


def _first_places(places: list[tuple[int, Place]]) -> tuple[list[Place], list[tuple[int, Place]]]:
    """One place for each symbol, and those of the others that C++ cannot compare."""
    first: dict[int, Place] = {}
    others = []
    for index, place in places:
        if first.setdefault(index, place) is not place and place.kind in _OF_PYTHON:
            others.append((index, place))
    return [first[index] for index in sorted(first)], others


def _value_at(place: Place, owns: list[dict[Any, Any]], kwargs: dict[str, Any]) -> int:
    if place.kind == "input":
        return kwargs[place.name].size(place.dim)
    if place.kind == "argument":
        return kwargs[place.name]
    own = owns[place.holder]
    if place.kind == "length":
        return own[place.name].size(place.dim)
    if place.kind == "capacity":
        return own[buffers.BUFFERS][place.name].memory.size(place.dim)
    return own[place.name]


def fault_of(cache: Any, owns: list[dict[str, Any]]) -> str:
    """Why what ``cache`` and its holders keep cannot be compared before every run, or an empty string.

    Asked before a step is recorded: what a function in a cache changes could not be taken back.
    """
    try:
        for at, own in [*enumerate(owns), *_apart(cache)]:
            for name in _compared(at, own):
                _plain(name, own[name])
    except CannotLower as refusal:
        return str(refusal)
    return ""


def _fixed_attributes(cache: Any, recorder: Recorder) -> list[tuple[int, int, Any, Any]]:
    """What a cache keeps beside tensors and what counts: (holder, how much it keeps in all, getter, values).

    The holder -1 is the cache itself.
    """
    fixed = []
    symbolic = {(place.holder, place.name) for _, place in recorder.symbols.places}
    for at, before in [*enumerate(recorder.before), *_apart(cache)]:
        names = [name for name in _compared(at, before) if (at, name) not in symbolic]
        values = [_plain(name, before[name]) for name in names]
        getter = operator.itemgetter(*names) if names else None
        fixed.append((at, len(before), getter, values[0] if len(names) == 1 else tuple(values)))
    return fixed


def _apart(cache: Any) -> list[tuple[int, dict[str, Any]]]:
    """The attributes of ``cache`` itself, as those of the holder -1, where it is none of its own parts."""
    return [] if any(each is cache for each in parts(cache)) else [(-1, vars(cache))]


def _compared(at: int, own: dict[str, Any]) -> list[str]:
    """What of a holder, or of the cache where ``at`` is -1, is no tensor and no holder itself."""
    return [
        name
        for name, value in own.items()
        if name not in (buffers.BUFFERS, *PARTS)
        and (at < 0 or not isinstance(value, torch.Tensor))
        and (at < 0 or type(value) is not dict)
    ]


def _plain(name: str, value: Any) -> Any:
    """``value`` if it says by ``==`` whether another is the same, and is not changed in place."""
    if value is None or isinstance(value, bool | int | float | str | type | torch.dtype | torch.device):
        return value
    if type(value) is tuple:
        return tuple(_plain(name, each) for each in value)
    raise CannotLower(f"the cache keeps {name}, a {type(value).__name__}")
