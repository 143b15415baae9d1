"""Recording what `generate` calls, for a prompt of so many tokens or the token behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import ExportError
from ..huggingface import steps
from ..kv_cache import buffers
from ..kv_cache.layers import using
from ..program import disguise, execution
from ..program.arguments import cache_name
from ..program.attempt import Attempt
from ..program.recording import CannotLower
from . import arguments
from .recorded import Recorded, State, recorded, state_of

#: Of so many a prompt is made that is recorded.
_TOKENS = 100
#: How often a call is made, to be watched or recorded: the first ones may run what the others do not.
_CALLS = 8


class Recording:
    """Stands for the recorded steps of a model while `generate` calls it: notes one of its calls.

    Args:
        seen: How many tokens lie before the call that is noted; 0: that of the prompt.
    """

    def __init__(self, model: torch.nn.Module, seen: int) -> None:
        self._model, self._seen = model, seen
        self._numbers: set[str] = set()
        self._ran: execution.Execution | None = None
        self.state: State = {}
        self.result: Recorded | None = None

    def model(self) -> torch.nn.Module:
        """The one whose calls are noted."""
        return self._model

    def serve(self, model: torch.nn.Module, call: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """The result of ``call(**kwargs)``, as `program.step.Steps.serve` gives it."""
        cache = kwargs[cache_name(kwargs)]
        seen = cache.get_seq_length()
        arguments.check(kwargs, seen)
        if seen != self._seen:
            return call(**kwargs)
        given = {
            name: value.contiguous() if isinstance(value, torch.Tensor) else value
            for name, value in kwargs.items()
        }
        with using():
            _settle(cache)
            self.state = state_of(cache)
            if self._ran is None:
                return self._watch(call, given)
            return self._record(model, call, given)

    def _watch(self, call: Callable[..., Any], given: dict[str, Any]) -> Any:
        with execution.observed() as ran:
            result = call(**given)
        if fault := ran.fault or execution.faults_in(ran.unread()):
            raise ExportError(fault)
        self._ran = ran
        return result

    def _record(self, model: torch.nn.Module, call: Callable[..., Any], given: dict[str, Any]) -> Any:
        assert self._ran is not None
        count = given[arguments.IDS].shape[1]
        # torch's symbols count from two: what is one long stays one long.
        begins = self._seen < 2
        names = arguments.GROWING if count > 1 or self._seen else ()
        growing = {name: (1,) for name in names if self._seen == 0 or name not in _OF_ONE_TOKEN}
        attempt = Attempt(model, given, self._ran, self._numbers, False, growing, begins)
        if attempt.fault:
            self._ran = None
            raise ExportError(attempt.fault)
        try:
            with disguise.one_at_a_time:
                result = attempt.run(call)
        except execution.Unforeseen as unforeseen:
            attempt.give_back()
            self._ran = None
            raise ExportError(f"runs {unforeseen}, which it did not run before") from None
        if fault := attempt.fault_of_run():
            attempt.give_back()
            self._ran = None  # with what runs only once, such as filling a cache of torch's
            raise ExportError(fault)
        if attempt.has_run_more():
            return result
        if not begins and (new := attempt.counted() - self._numbers):
            self._numbers |= new  # next time with symbols for what they count from
            return result
        self.result = recorded(attempt, count if count == 1 else None)
        return result


#: Arguments that are one token long behind a prompt.
_OF_ONE_TOKEN = (arguments.IDS, "position_ids")


def _settle(cache: Any) -> None:
    """What ``cache`` keeps beside what grows is contiguous, as a runner keeps it."""
    for layer in cache.layers:
        grown = vars(layer).get(buffers.BUFFERS, {})
        for own in (vars(layer), *(each for each in vars(layer).values() if type(each) is dict)):
            for name, value in list(own.items()):
                if type(value) is torch.Tensor and name not in grown:
                    own[name] = value.contiguous()


def record(model: torch.nn.Module, seen: int, count: int) -> tuple[Recorded, State]:
    """The call for ``count`` tokens behind ``seen``, and what the cache keeps before it.

    Either is the prompt (``seen`` 0) or one token behind it.

    Raises:
        ExportError: Why it cannot be recorded.
    """
    if torch._C._is_any_autocast_enabled():
        raise ExportError(
            "autocast is on, and a folder runs without it; export outside of torch.autocast, with the model "
            "in the dtype that is to be computed in"
        )
    # What lies behind a prompt has memory to grow in once a token more was appended.
    steps_before = int(seen > 1)
    ids = _prompt(model, (seen or count) - steps_before)
    recording = Recording(model, seen)
    fault: Exception | None = None
    with steps.served_by(model, recording), torch.no_grad():
        for _ in range(_CALLS):
            try:
                _generate(model, ids, steps_before + 1 + int(seen > 0))
            except (CannotLower, ExportError) as refusal:
                fault = refusal
            if recording.result is not None:
                return recording.result, recording.state
    what = f"one token behind {seen}" if seen else f"a prompt of {count} tokens"
    why = fault or "runs other functions in each call"
    raise ExportError(f"its forward for {what} {why}. Such a model runs in Python only") from fault


def _prompt(model: Any, count: int) -> torch.Tensor:
    """Some tokens [1, count]; none that stands for padding, which `generate` would mask."""
    config = model.generation_config
    named = (config.pad_token_id, config.eos_token_id, config.bos_token_id)
    special = {each for name in named for each in (name if isinstance(name, list) else [name])}
    plain = [each for each in range(min(_TOKENS, _vocabulary(model))) if each not in special]
    return torch.tensor([[plain[at % len(plain)] for at in range(count)]])


def _vocabulary(model: Any) -> int:
    return model.config.get_text_config(decoder=True).vocab_size


def _generate(model: Any, ids: torch.Tensor, count: int) -> None:
    """``count`` calls of forward, whatever the tokens are."""
    model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, use_cache=True)
