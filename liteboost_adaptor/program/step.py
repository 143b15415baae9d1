"""A model's forward for one more token: recorded when it comes again and again, then run from C++."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..replacements import cache as rooms
from ..report import Tally, report
from .holders import Kept, holders
from .lower import CannotLower, Writer
from .program import Program
from .recording import MOVED, SHORT
from .result import Outline
from .state import State, hooked, unchanged, watched

#: A step is recorded when it comes for this time with arguments of the same kinds. To record 28 layers takes
#: as long as a hundred steps save, and the first time twice that (half of it imports).
RECORDED_AT = 32
#: Programs kept for one kind of arguments. Where more are made, each must have served as many steps.
MOST = 8
#: How often a kind of arguments may make no program before nobody tries again.
REFUSALS = 2
#: Arguments whose last size is how much has been seen.
GROWING = ("attention_mask",)
#: Where models may be that have recorded steps.
DEVICES = ("cpu", "npu")
#: Arguments that are a cache.
CACHES = ("past_key_values", "cache_params")


class Steps:
    """The recorded steps of one model.

    Attributes:
        model: A weak reference to it.
    """

    def __init__(self, model: torch.nn.Module, tally: Tally) -> None:
        self.model = weakref.ref(model)
        self._tally = tally
        self._seen: dict[Any, int] = {}
        self._programs: dict[Any, list[Program]] = {}
        self._refused: dict[Any, int] = {}
        self._made: dict[Any, int] = {}
        self._moved: set[Any] = set()
        self._numbers: set[str] = set()
        #: Whether a graph may hold the addresses of weights.
        self._is_captured = False
        self._lock = threading.Lock()

    def serve(self, model: torch.nn.Module, call: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """The result of ``call(**kwargs)``, from a program if there is one."""
        key = _kinds(kwargs)
        if key is None:
            return call(**kwargs)
        cache = kwargs[cache_name(kwargs)]
        programs = self._programs.get(key, ())
        captured = _is_captured(kwargs["input_ids"])
        self._is_captured |= captured
        for program in programs:
            symbols = program.symbols(cache, kwargs)
            if symbols is None:
                continue
            if not program.state.is_as_it_was():
                with self._lock:
                    self._programs.pop(key, None)
                    self._seen[key] = 0
                break
            result = program.run(cache, kwargs, symbols)
            if result is not None:
                self._tally.served()
                program.runs += 1
                return result
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if seen < RECORDED_AT or self._is_vain(key, programs):
            return call(**kwargs)
        if not _has_rooms(cache) or hooked(model) or captured:
            self._seen[key] = 0  # looked for again some steps later
            return call(**kwargs)
        return self._record(model, call, kwargs, key)

    def _record(
        self, model: torch.nn.Module, call: Callable[..., Any], kwargs: dict[str, Any], key: Any
    ) -> Any:
        from .record import Recorder  # brings sympy and torch's tracing along

        cache, before = kwargs[cache_name(kwargs)], _calls()
        held_by = holders(cache.layers)
        owns = [holder.of(cache.layers) for holder in held_by]
        recorder, kept = Recorder(owns, self._numbers), Kept(owns)
        arguments = {
            name: recorder.input(name, value, 1 if name in GROWING else None)
            if type(value) is torch.Tensor
            else value
            for name, value in kwargs.items()
        }
        try:
            with unchanged(model) as changes, watched(model) as ran, recorder, rooms.recorded_by(recorder):
                result = call(**arguments)
        except Exception as fault:  # noqa: BLE001 - the reason is noted, and the original runs
            kept.give_back()
            words = str(fault).splitlines() or [""]
            return self._refuse(key, f"not recorded: {type(fault).__name__}: {words[0][:80]}", call(**kwargs))
        except BaseException:
            kept.give_back()
            raise
        try:
            outline = Outline(result, cache)
        except CannotLower as fault:
            # Nothing symbolic can be in it: only a tensor could be.
            return self._refuse(key, str(fault), result)
        result = outline.built(cache, iter([recorder.real(tensor) for tensor in outline.tensors]))
        fault = recorder.recording.fault or ran.fault or changes.fault
        if fault in (MOVED, SHORT):
            if key in self._moved:  # beam search moves it at every step
                self._seen[key] = 0
            self._moved.add(key)
            return result
        self._moved.discard(key)
        new = {key[1] for key, value in recorder.changed.items() if type(value) is int} - self._numbers
        if new and not fault:
            self._numbers |= new  # they count: next time with symbols for what they count from
            return result
        try:
            if fault:
                raise CannotLower(fault)
            writer = Writer(recorder, outline.tensors, not self._is_captured)
            program = Program(writer, recorder, cache, held_by, outline, State(model, ran), _since(before))
        except CannotLower as refusal:
            return self._refuse(key, str(refusal), result)
        except (MemoryError, RuntimeError) as fault:  # the step was made, and only its program was not
            return self._refuse(key, f"not recorded: {type(fault).__name__}: {str(fault)[:80]}", result)
        with self._lock:
            kept = sorted(self._programs.get(key, ()), key=lambda each: each.runs)[1 - MOST :]
            self._programs[key] = [program, *kept]
        self._made[key] = self._made.get(key, 0) + 1
        return result

    def _is_vain(self, key: Any, programs: Sequence[Program]) -> bool:
        """Whether recordings of these arguments are made in vain: refused, or right for too few steps."""
        if self._refused.get(key, 0) >= REFUSALS:
            return True
        return self._made.get(key, 0) >= MOST and sum(each.runs for each in programs) < MOST * len(programs)

    def _refuse(self, key: Any, reason: str, result: Any) -> Any:
        """Count a step that cannot be recorded; it is tried twice."""
        self._tally.fell_back(reason)
        self._refused[key] = self._refused.get(key, 0) + 1
        self._seen[key] = 0
        return result


def cache_name(kwargs: dict[str, Any]) -> str:
    """The argument that is a cache, or an empty string."""
    return next((name for name in CACHES if kwargs.get(name) is not None), "")


def _kinds(kwargs: dict[str, Any]) -> Any:
    """What of a call's arguments must be the same for a program to serve it, or ``None`` where none can."""
    ids, cache = kwargs.get("input_ids"), kwargs.get(cache_name(kwargs))
    if (
        type(ids) is not torch.Tensor
        or ids.dim() != 2
        or ids.shape[1] != 1
        or cache is None
        or ids.device.type not in DEVICES
    ):
        return None
    kinds: list[Any] = []
    for name, value in kwargs.items():
        if value is None or value is True or value is False:
            kinds += (name, value)
        elif type(value) is torch.Tensor:
            shape = value.shape
            if name in GROWING:
                if len(shape) != 2:
                    return None
                shape = shape[:1]
            kinds += (name, shape, value.dtype)
        elif value is cache:
            layers = getattr(cache, "layers", None)
            if type(layers) is not list:
                return None
            kinds += (name, type(cache), len(layers))
        elif type(value) in (int, float, str):
            kinds += (name, type(value), value)
        else:
            return None
    return tuple(kinds)


def _is_captured(ids: torch.Tensor) -> bool:
    """Whether what runs becomes a part of a graph: what a recording keeps aside does not belong there."""
    return ids.device.type == "npu" and torch.get_device_module(ids.device).is_current_stream_capturing()


def _has_rooms(cache: Any) -> bool:
    found = [room for layer in cache.layers for room in vars(layer).get(rooms.ROOMS, {}).values()]
    return all(isinstance(room, rooms.Room) for room in found)


def _calls() -> dict[str, int]:
    return {rule: tally.calls for rule, tally in report.tallies.items()}


def _since(before: dict[str, int]) -> dict[Tally, int]:
    counts = {rule: calls - before.get(rule, 0) for rule, calls in _calls().items()}
    return {report.tally(rule): count for rule, count in counts.items() if count}
