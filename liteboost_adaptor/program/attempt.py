"""One attempt to record a step: what is seen while it runs, how it is taken back, and what is made of it."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ..kv_cache import buffers
from . import casts, disguise, execution, trusted_code
from .arguments import GROWING, cache_name, is_passed_on, nested, tokens
from .cache_state import CacheSnapshot, cache_dicts
from .caches import parts
from .execution import Execution
from .functions import Functions
from .lower import Writer
from .passes import slots_read
from .program import Program, fault_of, written_to
from .record import Recorder
from .recording import Call, CannotLower, Length
from .result import Outline
from .stand_in import StandIns
from .state import State
from .symbolic_tensor import SymbolicTensor, is_untouched
from .tensors import Known


class Attempt:
    """Runs a step once, as ever, and notes it.

    Args:
        given: The arguments.
        ran: What Python ran in a former step. More that runs in this one is added.
        numbers: Attributes of cache layers that count.
        is_copied: Whether arguments are contiguous copies of those of the caller.
        growing: Arguments -> dimensions along which their size is another in every run: see `Recorder.input`.
            Numbers have none.
        unread: Arguments whose values are not those of the call, so nothing may be computed of them.
        begins: Whether the step fills a cache, instead of appending to one: see `Recorder`.

    Attributes:
        fault: Why the step is not even tried, or an empty string.
        is_tainted: Whether a symbol may have got into the result, or into what the step has changed: then
            the step has to be taken back, and made again without.
        recorder: What has noted it.
        held_by: What keeps the tensors of the cache.
        outline: Of the result of `run`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        given: dict[str, Any],
        ran: Execution,
        numbers: Collection[str],
        is_copied: bool = False,
        growing: Mapping[str, Sequence[int] | None] = GROWING,
        begins: bool = False,
        unread: Collection[str] = (),
    ) -> None:
        self._given, self._ran, self._is_copied = given, ran, is_copied
        self._growing, self._unread = growing, unread
        self._cache = cache = given[cache_name(given)]
        self.held_by = cache_dicts(parts(cache))
        owns = [holder.of(parts(cache)) for holder in self.held_by]
        self._state = State(model, cache, ran)
        self._stand_ins = StandIns()
        self.fault = self._state.fault or fault_of(cache, owns) or self._unknown(ran)
        self.recorder = Recorder(owns, numbers, Known(self._state.tensors), begins)
        self._of_cache = dict(vars(cache))
        self._kept, self._generators = CacheSnapshot(owns), _Generators(tokens(given).device)
        self._has_run_more = False
        self._fault_of_run = ""
        self.is_tainted = False

    def run(self, call: Callable[..., Any]) -> Any:
        """The result of ``call`` with the arguments.

        Raises:
            Unforeseen: It calls what the former step did not, and nobody has read.
        """
        recorder, functions = self.recorder, Functions(self.recorder)
        noted: dict[int, torch.Tensor] = {}

        def argument(name: str, value: Any) -> Any:
            if is_passed_on(self._given, name):
                return self._stand_ins.of(name)
            if type(value) is not torch.Tensor:
                grows = type(value) is int and self._growing.get(name) == ()
                return recorder.number(name, value) if grows else value
            if id(value) not in noted:
                noted[id(value)] = recorder.input(name, value, self._growing.get(name, ()))
            return noted[id(value)]

        given = {name: argument(name, value) for name, value in self._given.items()}
        with (
            disguise.disguised(self._ran, SymbolicTensor),
            execution.observed(self._ran.codes) as ran,
            functions,
            recorder,
            buffers.recorded_by(recorder),
        ):
            result = call(**nested(given))
        given.clear()
        cast = recorder.cast_by_autocast
        casts.settle(recorder.recording, cast, recorder.shapes() if cast else {})
        self._counts = ran.counts
        if fault := self._stand_ins.fault() or self._unknown(ran) or self._reads_unread():
            self._fault_of_run, self.is_tainted = fault, True
            return result
        try:
            self.outline = Outline(result, self._cache)
        except CannotLower as refusal:
            self._fault_of_run, self.is_tainted = str(refusal), True
            return result
        self._results = self.outline.tensors
        fault = self._fault_in_results()
        result = self.outline.built(self._cache, [recorder.real(tensor) for tensor in self._results])
        seen = recorder.recording.fault or functions.fault or ran.fault or self._fault_in(ran)
        drawn = "draws random numbers" if self._generators.have_moved() else ""
        self._fault_of_run = self._change() or fault or seen or drawn
        self.is_tainted |= recorder.is_tainted or ran.is_tainted
        return result

    def _unknown(self, ran: Execution) -> str:
        """Which argument code may have read that is not known: see `stand_in`."""
        name = next((name for name in self._given if is_passed_on(self._given, name)), "")
        if not name or not (unread := ran.unread()):
            return ""
        kind = type(self._given[name]).__name__
        return f"{name} is given as a {kind}, and {unread[0].co_name} is not of a released library"

    def _reads_unread(self) -> str:
        """Which argument without its values something was computed of, or an empty string."""
        recording = self.recorder.recording
        read = {slot for call in recording.calls if isinstance(call, Call) for slot in slots_read(call)}
        names = (name for name in self._unread if recording.inputs.get(name) in read)
        return next((f"computes with {name}" for name in names), "")

    def _fault_in(self, ran: Execution) -> str:
        more = {
            code: names
            for code, names in ran.codes.items()
            if code not in self._ran.codes and not _is_below(names.get("__name__") or "")
        }
        self._has_run_more = bool(more)
        self._ran.codes |= ran.codes
        unread = Execution(more).unread()
        self.is_tainted |= disguise.asks_for_types(unread)  # they were told what stands for a tensor
        return execution.faults_in(unread)

    def _fault_in_results(self) -> str:
        """What a caller would find otherwise where a run had made the results."""
        recorder = self.recorder
        if recorder.written.is_reformed():
            return "leaves another form of a tensor that was there before"
        if self._is_copied and written_to(recorder)[2]:
            self.is_tainted = True
            return "writes to an argument of which only a copy is contiguous"
        was_there = {id(tensor) for tensor in (*self._state.tensors, *self._given.values())}
        for tensor in self._results:
            real = recorder.real(tensor)
            if id(real) in was_there:
                if self._is_copied and id(real) in {id(each) for each in self._given.values()}:
                    self.is_tainted = True
                    return "returns an argument of which only a copy is contiguous"
                continue
            if real is not tensor and not is_untouched(tensor):
                self.is_tainted = True
                return "returns a tensor that it has written attributes on"
            if real.is_inference() != torch.is_inference_mode_enabled():
                return "returns a tensor made in another inference mode than the caller's"
            if real.__dict__ or real.requires_grad or type(real) is not torch.Tensor:
                return "returns a tensor that is more than its values"
        return ""

    def _change(self) -> str:
        now = vars(self._cache)
        if now.keys() != self._of_cache.keys() or any(
            now[name] is not value for name, value in self._of_cache.items()
        ):
            self.is_tainted = True
            return "changes an attribute of the cache"
        if self._state.is_as_it_was():
            return ""
        self.is_tainted = True
        return f"changes {next(self._state.changes(), 'what it reads')}"

    def give_back(self) -> None:
        """Make everything what it was, after a step that failed half way."""
        vars(self._cache).clear()
        vars(self._cache).update(self._of_cache)
        with torch.no_grad():
            self.recorder.written.give_back()
        self._kept.give_back()
        self._state.give_back()
        self._generators.give_back()

    def fault_of_run(self) -> str:
        """Why what ran makes no program, or an empty string."""
        return self._fault_of_run

    def has_run_more(self) -> bool:
        """Whether functions ran that were not looked at before the step."""
        return self._has_run_more

    def counted(self) -> set[str]:
        """Numbers of the cache that the step has changed, to others or to what follows from its lengths."""
        return {key[1] for key, value in self.recorder.changed.items() if type(value) in (int, Length)}

    def writer(self, may_move: bool) -> Writer:
        """What writes the step as the text of a program.

        Args:
            may_move: Whether weights may be given other memory.

        Raises:
            CannotLower: A program has no instruction for something.
        """
        return Writer(self.recorder, self._results, may_move)

    def program(self, may_move: bool) -> Program:
        """The step as a program.

        Args:
            may_move: Whether weights may be given other memory.

        Raises:
            CannotLower: A program has no instruction for something.
        """
        recorder = self.recorder
        self._state.freeze(recorder.told)
        writer = self.writer(may_move)
        return Program(writer, recorder, self._cache, self.held_by, self.outline, self._state, self._counts)


def _is_below(module: str) -> bool:
    """Whether a function of ``module`` has no state that a step could change."""
    return trusted_code.is_fixed(module) or trusted_code.is_standard(module)


class _Generators:
    """Where the generators of random numbers stand."""

    def __init__(self, device: torch.device) -> None:
        self._of, self._torch = device, torch.get_rng_state()
        self._random = random.getstate()
        numpy = sys.modules.get("numpy.random")
        self._numpy = numpy.get_state() if numpy is not None else None
        self._device = torch.get_device_module(device) if device.type != "cpu" else None
        self._of_device = self._device.get_rng_state() if self._device is not None else None

    def have_moved(self) -> bool:
        """Whether any of them stands elsewhere."""
        now = _Generators(self._of)
        same = torch.equal(now._torch, self._torch) and now._random == self._random
        if self._of_device is not None and now._of_device is not None:
            same = same and torch.equal(now._of_device, self._of_device)
        if self._numpy is not None and now._numpy is not None:
            same = same and now._numpy[2] == self._numpy[2] and (now._numpy[1] == self._numpy[1]).all()
        return not same

    def give_back(self) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._random)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)
        if self._device is not None:
            self._device.set_rng_state(self._of_device)
