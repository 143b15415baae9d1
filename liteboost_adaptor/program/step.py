"""A model's forward for one more token, or a few: recorded when it comes often, then run from C++."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..errors import DeviceFaultError, StrictError
from ..kv_cache.layers import using
from ..report import CallCounter
from . import arguments, casts, disguise, execution, reasons, schedule, shadow
from .arguments import cache_name
from .caches import is_begun
from .graph import CAPTURED_AT, GraphLaterError, GraphRefusedError, Graphs, rehearsed
from .program import Program, Run
from .recording import MOVED, SHORT, CannotLower
from .stand_in import ReadsArgument
from .state import hooked
from .step_call import StepCall, buffers_in, coincides, has_buffers, is_short, makes_room, moves, takes_back

#: A step is recorded when it comes for this time with arguments of the same kinds, or earlier where it is
#: known that it will come again (see `schedule`). Recording takes as long as about so many replays save
#: (``docs/decisions/0059-recordings-that-pay.md``).
RECORDED_AT = 64
#: Programs kept for one kind of arguments. Where more are made, each must have served as many steps.
MOST = 8
#: How often a kind of arguments may make no program before nobody tries again.
REFUSALS = 2
#: How often a step may be tried again because it ran functions that it did not run before.
ATTEMPTS = 4
#: Why no program makes a step -> what may let one make it, and says whether it has changed anything.
_MENDED: dict[str, Callable[[Any], bool]] = {
    reasons.OTHER_CACHE: makes_room,
    **dict.fromkeys(reasons.STOPS, takes_back),
}
#: Kinds of arguments that are counted: who hands on another number at each step makes ever more of them.
KINDS = 256


class Steps:
    """The recorded steps of one model.

    Args:
        parameters: Names of its forward's.

    Attributes:
        model: A weak reference to it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        counter: CallCounter,
        parameters: Container[str],
        is_strict: bool = False,
        graph: str = "0",
    ) -> None:
        self.model = weakref.ref(model)
        self._graphs = Graphs(graph, type(model).__qualname__)
        self._counter = counter
        self._is_strict, self._parameters = is_strict, parameters
        self._seen: dict[Any, int] = {}
        self._programs: dict[Any, list[Program]] = {}
        self._refused: dict[Any, int] = {}
        self._made: dict[Any, int] = {}
        self._numbers: set[str] = set()
        #: What Python ran in the step before the one that is recorded.
        self._ran: dict[Any, execution.Execution] = {}
        #: The same of the step before that, where not all of it was foreseen.
        self._former: dict[Any, execution.Execution] = {}
        self._attempts: dict[Any, int] = {}
        #: Kinds whose cache had buffers behind the step that was watched.
        self._grows: set[Any] = set()
        #: Programs that were dropped before they had paid for themselves.
        self._lost = 0
        #: Why a step was not recorded when it was last tried.
        self._why: dict[Any, str] = {}
        #: By kind the last cache that had no buffers, while it lives.
        self._unbuffered: dict[Any, weakref.ref[Any]] = {}
        #: Whether a graph may hold the addresses of weights.
        self._is_captured = False
        self._lock = threading.Lock()
        _all.add(self)

    def forget(self) -> None:
        """Let go of all programs."""
        with self._lock:
            for program in [each for programs in self._programs.values() for each in programs]:
                program.close()
            self._programs.clear()
            self._seen.clear()
            self._graphs.close()

    def serve(self, model: torch.nn.Module, call: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """The result of ``call(**kwargs)``, from a program if there is one.

        A decode step is counted once: as served, or with the reason why it was not.
        """
        if not is_begun(kwargs[cache_name(kwargs)]):
            return call(**kwargs)  # a prompt of one token
        named = arguments.flat(kwargs)
        key = arguments.kinds(named, self._parameters)
        if key is None:
            if arguments.is_decode_step(kwargs):
                self._counter.count_fallback(arguments.fault(named))
            return call(**kwargs)
        given = arguments.dense(named)
        return self.serve_step(model, StepCall(call, kwargs, given, key, given is not named))

    def serve_step(self, model: torch.nn.Module, step: StepCall) -> Any:
        """The result of a call that may be recorded, from a program if there is one."""
        if (cast := casts.dtype()) is not None:
            step = replace(step, key=(step.key, cast))
        key, cache = step.key, step.cache
        programs = self._programs.get(key, ())
        captured = _is_captured(arguments.tokens(step.kwargs))
        self._is_captured |= captured
        result, reason = self._from_program(step, programs)
        if reason in _MENDED and not captured and _MENDED[reason](cache):
            result, reason = self._from_program(step, programs)
        if not reason:
            return result
        without_buffers = self._without_buffers(key, cache)
        if reason == reasons.OTHER_CACHE and without_buffers:
            reason = self._why[key] = without_buffers
        elif reason == reasons.NEW and self._why.get(key) != reasons.NEW_CACHE:
            reason = self._why.get(key, reason)
        if len(self._seen) > KINDS:
            self._seen.clear()
            self._why.clear()
            self._unbuffered.clear()
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        due = self._due(seen, step)
        if not due or self._is_vain(key, programs):
            return self._original(reason, step)
        if fault := reasons.CAPTURED if captured else _why_not_now(model) or without_buffers:
            if fault != reasons.NEW_CACHE:
                self._seen[key] = 0  # looked for again some steps later
            self._why[key] = fault
            return self._original(fault, step)
        if moves(cache, key in self._grows, step.count):
            return self._original(MOVED, step)
        if is_short(cache):
            return self._original(SHORT, step)
        if key not in self._ran:
            return self._watch(step)
        if due > seen:
            return self._original(reason, step)
        if coincides(step, self._numbers):
            return self._original(reasons.COINCIDES, step)
        if not disguise.one_at_a_time.acquire(blocking=False):
            # To wait for it could be to wait for oneself.
            return self._original(reasons.BUSY, step)
        try:
            with using():
                return self._record(model, step)
        finally:
            disguise.one_at_a_time.release()

    def _due(self, seen: int, step: StepCall) -> int:
        """At which count a step that has come ``seen`` times is recorded, if now or the next time; else 0."""
        programs = [program for each in self._programs.values() for program in each]
        to_come = schedule.steps_to_come(step.count) if seen > 1 else 0
        return schedule.recorded_at(seen, to_come, RECORDED_AT, self._lost + _unpaid(programs))

    def _without_buffers(self, key: Any, cache: Any) -> str:
        """Why the cache copies what it keeps to append to it, or an empty string. It is new once."""
        if has_buffers(cache):
            return ""
        last, without = self._unbuffered.get(key), (reasons.NEW_CACHE, reasons.COPIED)
        if last is not None and last() is cache and self._why.get(key) in without:
            return reasons.COPIED
        self._unbuffered[key] = weakref.ref(cache)
        return reasons.NEW_CACHE

    def _count_served(self, key: Any) -> None:
        self._counter.count_served()
        self._why.pop(key, None)

    def _original(self, reason: str, step: StepCall) -> Any:
        self._counter.count_fallback(reason)
        return step.original()

    def _counted(self, reason: str, result: Any) -> Any:
        self._counter.count_fallback(reason)
        return result

    def _from_program(self, step: StepCall, programs: Sequence[Program]) -> tuple[Any, str]:
        """The result, and an empty string; or why no program makes this step, which is not counted yet."""
        key, cache, given, reason = step.key, step.cache, step.given, reasons.NEW
        for program in programs:
            if program.is_vain:
                reason = reasons.VAIN
                continue
            if program.decides and not execution.is_possible():
                reason = reasons.LOOKED_AT
                continue  # a profiler would see the runs that stop, too
            symbols = program.symbols(cache, given)
            if symbols is None or (step.is_copied and program.writes_to_arguments):
                reason = reasons.OTHER_CACHE
                continue
            if not program.state.warns_as_before():
                reason = reasons.WARNS
                continue
            if not program.state.is_as_it_was():
                with self._lock:
                    self._lost += _unpaid(self._programs.pop(key, ()))
                    self._seen[key] = 0
                    self._ran.pop(key, None)  # other functions may run now
                self._why[key] = reasons.CHANGED
                return None, reasons.CHANGED
            if _is_checked(program, given):
                with using():
                    checked = shadow.checked(program, step, symbols)
                if not isinstance(checked, str):
                    return self._checked(key, program, *checked), ""
                reason = checked
                continue
            result, stopped, raised = self._replayed(program, cache, given, symbols)
            if raised:  # The original raises by itself, and leaves what it leaves.
                return self._original(f"a replay raised {raised}", step), ""
            if not stopped:
                self._count_served(key)
                return result, ""
            reason = stopped
        return None, reason

    def _replayed(
        self, program: Program, cache: Any, given: dict[str, Any], symbols: list[int]
    ) -> tuple[Any, str, str]:
        """The result, why the program stopped, and what it raised."""
        with using():  # what the cache keeps stays where it is until the result is kept there
            try:
                run = self._run(program, cache, given, symbols)
            except DeviceFaultError:
                raise  # nothing else runs on that device
            except Exception as raised:
                if program.writes(cache, given):
                    raise
                program.stops += 1
                return None, "", _words(raised)
            if isinstance(run, str):
                return None, run, ""
            program.runs += 1
            return program.commit(run, cache), "", ""

    def _run(self, program: Program, cache: Any, given: dict[str, Any], symbols: list[int]) -> Run | str:
        """One run of ``program`` or why it stopped; as a graph where it has run before and may be one."""
        ids = arguments.tokens(given)
        graphs = self._graphs
        if program.runs < CAPTURED_AT or _is_captured(ids) or not graphs.lock.acquire(blocking=False):
            return program.run(cache, given, symbols)
        try:
            if graph := graphs.of(program, ids.device):
                run = program.run(cache, given, symbols, graph)
                if not isinstance(run, str):
                    graphs.counter.count_served()
                return run
        except GraphLaterError as later:
            graphs.counter.count_fallback(str(later))
            with rehearsed():
                return program.run(cache, given, symbols)
        except GraphRefusedError as refusal:
            program.graph_fault = f"not captured: {refusal}"
            graphs.counter.count_fallback(program.graph_fault)
        finally:
            graphs.lock.release()
        return program.run(cache, given, symbols)

    def _checked(self, key: Any, program: Program, result: Any, difference: str) -> Any:
        """The original's ``result``; a program that gave another is never run again."""
        if not difference:
            self._count_served(key)
            program.runs += 1
            return result
        words = (
            f"a recorded step of {type(self.model()).__name__} gave another {difference} than the model "
            "itself; the model's is returned, and such steps are not recorded any more"
        )
        with self._lock:
            self._programs.pop(key, None)
            self._refused[key] = REFUSALS
        self._why[key] = f"the replay differed from the original in {difference}"
        self._counter.count_fallback(self._why[key])
        if self._is_strict:
            raise StrictError(f"LITEBOOST_STRICT=1 and {words}. Please report this model.")
        warnings.warn(f"liteboost_adaptor: {words}. Please report this model.", RuntimeWarning, stacklevel=2)
        return result

    def _watch(self, step: StepCall) -> Any:
        """See what Python runs in a step: the next one is recorded if all of that is understood."""
        key = step.key
        with execution.observed() as ran:
            result = step.original()
        if key in self._former:
            ran.codes |= self._former.pop(key).codes
        fault = ran.fault or execution.faults_in(ran.unread())
        if fault:
            return self._refuse(key, fault, result)
        self._ran[key] = ran
        if buffers_in(step.cache):
            self._grows.add(key)
        return self._counted(reasons.WATCHED, result)

    def _record(self, model: torch.nn.Module, step: StepCall) -> Any:
        from .attempt import Attempt  # brings sympy and torch's tracing along

        key = step.key
        try:
            attempt = Attempt(
                model,
                step.given,
                self._ran[key],
                self._numbers,
                step.is_copied,
                step.grown(),
                unread=step.unread,
            )
        except Exception as raised:  # noqa: BLE001 - an object of the user's cannot be looked into
            return self._refuse(key, f"not recorded: {_words(raised)}", step.original())
        if attempt.fault:
            return self._refuse(key, attempt.fault, step.original())
        try:
            result = attempt.run(step.call)
        except ReadsArgument as raised:
            attempt.give_back()
            self._refuse(key, str(raised), None)
            return step.original()
        except execution.Unforeseen:
            attempt.give_back()
            return self._again(key, step.original())
        except Exception as raised:  # noqa: BLE001 - the reason is noted, and the original runs
            attempt.give_back()
            self._refuse(key, f"recording raised {_words(raised)}", None)
            return step.original()
        except KeyboardInterrupt:  # of no line of the model's: it does not come again
            attempt.give_back()
            raise
        except BaseException as raised:  # noqa: BLE001 - raised again by the original, on what it then leaves
            attempt.give_back()
            self._refuse(key, f"recording raised {_words(raised)}", None)
            return step.original()
        fault = attempt.fault_of_run()
        if attempt.is_tainted:
            attempt.give_back()
            self._refuse(key, fault, None)
            return step.original()
        if fault in (MOVED, SHORT):
            self._why[key] = fault
            if fault == MOVED:  # not for want of room
                self._seen[key] = 0
            return self._counted(fault, result)
        if not fault and (new := attempt.counted() - self._numbers):
            self._numbers |= new  # they count: next time with symbols for what they count from
            return self._counted(reasons.NUMBERS, result)
        if not fault and attempt.has_run_more():
            self._attempts[key] = self._attempts.get(key, 0) + 1
            if self._attempts[key] < ATTEMPTS:
                # The next one is compared with this one's functions, too.
                return self._counted(reasons.MORE_FUNCTIONS, result)
            fault = reasons.OTHER_FUNCTIONS
        if fault:
            return self._refuse(key, fault, result)
        try:
            program = attempt.program(not self._is_captured)
        except CannotLower as refusal:
            return self._refuse(key, str(refusal), result)
        except (MemoryError, RuntimeError) as raised:  # the step was made, and only its program was not
            return self._refuse(key, f"not recorded: {_words(raised)}", result)
        with self._lock:
            by_runs = sorted(self._programs.get(key, ()), key=lambda each: each.runs, reverse=True)
            self._programs[key] = [program, *by_runs[: MOST - 1]]
        self._made[key] = self._made.get(key, 0) + 1
        self._why.pop(key, None)
        return self._counted(reasons.RECORDED, result)

    def _again(self, key: Any, result: Any) -> Any:
        """A step was not recorded for what it ran: the next one is watched, and the one after it recorded."""
        self._attempts[key] = self._attempts.get(key, 0) + 1
        if self._attempts[key] >= ATTEMPTS:
            return self._refuse(key, reasons.OTHER_FUNCTIONS, result)
        self._former[key] = self._ran.pop(key)
        return self._counted(reasons.MORE_FUNCTIONS, result)

    def _is_vain(self, key: Any, programs: Sequence[Program]) -> bool:
        """Whether recordings of these arguments are made in vain: refused, or right for too few steps."""
        if self._refused.get(key, 0) >= REFUSALS:
            return True
        return self._made.get(key, 0) >= MOST and sum(each.runs for each in programs) < MOST * len(programs)

    def _refuse(self, key: Any, reason: str, result: Any) -> Any:
        """Count a step that cannot be recorded; it is tried twice."""
        self._counter.count_fallback(reason)
        self._why[key] = reason
        self._refused[key] = self._refused.get(key, 0) + 1
        self._seen[key] = 0
        self._ran.pop(key, None)
        return result


def _unpaid(programs: Iterable[Program]) -> int:
    """How many have not paid for their recording."""
    return sum(program.runs < RECORDED_AT for program in programs)


def _words(raised: BaseException) -> str:
    return f"{type(raised).__name__}: {(str(raised).splitlines() or [''])[0][:80]}"


#: Of all models.
_all: weakref.WeakSet[Steps] = weakref.WeakSet()


def forget_all() -> None:
    """Let go of the programs of all models: they hold their parameters."""
    for steps in list(_all):
        steps.forget()


def _is_checked(program: Program, given: dict[str, Any]) -> bool:
    """Whether the original runs beside the program this time.

    Not where ranks exchange: each exchange would come twice, and ranks that have left a call at different
    places count different runs. Nor where an operator of somebody else's may count its calls.
    """
    return (
        shadow.is_due(program.runs)
        and not program.is_made_once
        and arguments.tokens(given).is_cpu
        and execution.is_possible()
    )


def _is_captured(ids: torch.Tensor) -> bool:
    """Whether what runs becomes a part of a graph: what a recording keeps aside does not belong there."""
    return ids.device.type == "npu" and torch.get_device_module(ids.device).is_current_stream_capturing()


def _why_not_now(model: torch.nn.Module) -> str:
    """Why no step of ``model`` can be recorded at the moment, or an empty string."""
    if not execution.is_possible():
        return reasons.LOOKED_AT
    if hooked(model):
        return reasons.HOOKED
    return ""
