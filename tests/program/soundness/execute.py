"""A program run three ways: with recorded steps, served without them, and left alone."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import itertools
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.calls import faults_of_steps
from transformers import DynamicCache

import liteboost_adaptor
from liteboost_adaptor.program import schedule, step
from liteboost_adaptor.report import report

from . import trace
from .program import AUTOCAST, AUTOCAST_STEPS, FORMS, STEPS, Program
from .world import as_found

RULE = "step.program"
#: Of outputs of transformers' own code, relative, in fp32.
TOLERANCE = 1e-4
PROMPT = 5
#: The module of shadow checks, with `is_due`.
SHADOW = "liteboost_adaptor.program.shadow"
#: How the status begins to say that a replay was not what the original gave.
DIFFERED = "the replay differed"
#: Steps after which the random number generators are compared.
SEEDS = 6
_numbers = itertools.count()


@dataclasses.dataclass
class Outcome:
    """What became of a program.

    Attributes:
        recorded: How the run with recorded steps differs from the one without them, or nothing.
        served: How the run on our ops differs from that of transformers.
        counts: How the numbers of calls that the status gives cannot be.
        shadow: What a shadow check has found to differ: it is mended, but should not have been recorded.
        replays: Steps that ran as programs.
        reasons: Why steps were not recorded.
        raised: What steps raised without us.
    """

    recorded: str
    served: str
    counts: str
    shadow: str
    replays: int
    reasons: list[str]
    raised: list[str]

    @property
    def fault(self) -> str:
        return self.recorded or self.served or self.counts or self.shadow


def run(program: Program, control: bool = False) -> Outcome:
    """All three runs, compared.

    Args:
        control: Switch recorded steps off in all of them: what then differs is the idioms' own doing.
    """
    with _written(program) as path, _recorded_early(program.shadows):
        liteboost_adaptor.undo()  # nor are copies served that a program makes of a model left alone
        is_exact = program.form == FORMS[0]
        ours = _variant(program, path, _prepared(program, RULE if control else None))
        alone = _variant(program, path, liteboost_adaptor.undo) if is_exact else None
        if is_exact and not (control or ours.replays) and not trace.first_difference(ours, alone, TOLERANCE):
            plain = ours  # nothing ran that the third run could tell from it
        else:
            plain = _variant(program, path, _prepared(program, RULE))
    most = {rule: 3 * calls + 200 for rule, calls in plain.calls.items()}
    over = {rule: n for rule, n in ours.calls.items() if rule != RULE and n > most.get(rule, 200)}
    if ours.replays > 4 * STEPS:
        over[RULE] = ours.replays
    return Outcome(
        recorded=trace.first_difference(ours, plain),
        served=trace.first_difference(plain, alone, TOLERANCE) if alone else "",
        counts=f"{over} calls" if over else "",
        shadow=next((reason for reason in ours.reasons if reason.startswith(DIFFERED)), ""),
        replays=ours.replays,
        reasons=ours.reasons,
        raised=sorted(
            {str(what[-1]) for where, what in (alone or plain).entries if where.endswith(" raised")}
        ),
    )


def _prepared(program: Program, disabled: str | None) -> Callable[[torch.nn.Module], Any]:
    quant = program.form if program.form in ("kv8", "w8a16") else None

    def prepare(model: torch.nn.Module) -> None:
        model.to(torch.bfloat16 if program.form == "bfloat16" else torch.float32)
        liteboost_adaptor.apply(model, level=2, disable=disabled, quant=quant)

    return prepare


@contextlib.contextmanager
def _recorded_early(shadows: bool) -> Iterator[None]:
    """As the tests have it; see tests/conftest.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "RECORDED_AT", 4)
        patch.setattr(schedule, "_DOUBLED", 0)  # what is dropped is recorded again: programs have 60 steps
        if not shadows and importlib.util.find_spec(SHADOW):
            patch.setattr(importlib.import_module(SHADOW), "is_due", lambda runs: False)
        yield


@contextlib.contextmanager
def _written(program: Program) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="soundness-") as folder:
        path = Path(folder) / "script.py"
        path.write_text(program.source())
        yield path


def _variant(program: Program, path: Path, prepare: Callable[[torch.nn.Module], Any]) -> trace.Trace:
    made = trace.Trace()
    before = {rule: counter.calls for rule, counter in report.counters.items()}
    reasons = report.counter(RULE).fallbacks.copy()
    with as_found(), _loaded(path) as module, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        mode = torch.inference_mode() if program.inference else torch.no_grad()
        model = module.Model(module.configuration())
        _perturb(model)
        prepare(model)
        try:
            with mode, _autocast(program.form == AUTOCAST):
                _Script(program, module, model, made).run()
        finally:
            liteboost_adaptor.undo()  # before `as_found` puts back what is ours, too
    made.calls = {rule: counter.calls - before.get(rule, 0) for rule, counter in report.counters.items()}
    made.replays = made.calls.get(RULE, 0)
    made.reasons = faults_of_steps(report.counter(RULE).fallbacks - reasons)
    return made


@contextlib.contextmanager
def _loaded(path: Path) -> Iterator[ModuleType]:
    """The module, loaded anew: no run sees what another has set in it."""
    name = f"soundness_{next(_numbers)}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[name]


def _perturb(model: torch.nn.Module) -> None:
    """Norms whose weights are all one, and biases of zero, would hide mistakes."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.1)


class _Script:
    """The user's loop: a prompt, then one token after the other."""

    def __init__(self, program: Program, module: ModuleType, model: Any, made: trace.Trace) -> None:
        self._program, self._model, self._trace = program, model, made
        self._actions = module.ACTIONS
        generator = torch.Generator().manual_seed(1)
        self._ids = torch.randint(1, 64, (program.rows, PROMPT + STEPS), generator=generator)
        self._mask = torch.ones_like(self._ids)
        if program.rows > 1:
            self._mask[0, :2] = 0
        caches = {"plain": DynamicCache, "config": lambda: DynamicCache(config=model.config)}
        cache = caches.get(program.cache, lambda: None)()
        self._user = SimpleNamespace(
            cache=cache, args={}, out=None, step=-1, log=[], kept={}, ids=self._ids, call=None, module=module
        )

    def run(self) -> None:
        for at in range(-1, STEPS):
            self._step(at)
        self._act("end", STEPS)
        self._trace.note("log", self._user.log)
        self._trace.note("cache", trace.of_cache(self._user.cache))
        self._trace.note("model", trace.of_model(self._model))
        self._trace.note("training", self._model.training)

    def _step(self, at: int) -> None:
        user = self._user
        first, last = (0, PROMPT) if at < 0 else (PROMPT + at, PROMPT + at + 1)
        user.step, user.out = at, None
        user.args = self._arguments(first, last)
        self._act("between", at)
        self._act("back", at)
        self._act("each", at)
        call = self._call
        for place, start, until, action in self._actions:
            if place == "wrap" and start <= at < until:
                call = _wrapped(action, call, self._model, user)
        try:
            with _autocast(self._program.form == AUTOCAST_STEPS):
                user.out = call()
        except Exception as fault:  # noqa: BLE001 - compared
            self._trace.note(f"step {at} raised", (type(fault).__name__,))
        else:
            if user.cache is None:
                user.cache = _cache_in(user.out)
            self._trace.note(f"step {at}", user.out)
        self._act("after", at)
        if at % SEEDS == SEEDS - 1:
            self._trace.note(f"seeds {at}", trace.seeds())

    def _call(self) -> Any:
        user = self._user
        if user.call is not None:
            return user.call(self._model, user)
        if self._program.style == "positional":
            args = user.args
            names = ("input_ids", "attention_mask", "position_ids", "past_key_values")
            rest = {name: value for name, value in args.items() if name not in names}
            return self._model(*[args.get(name) for name in names], **rest)
        return self._model(**user.args)

    def _arguments(self, first: int, last: int) -> dict[str, Any]:
        style, user = self._program.style, self._user
        args = {"input_ids": self._ids[:, first:last], "past_key_values": user.cache, "use_cache": True}
        if style == "mask":
            args["attention_mask"] = self._mask[:, :last]
        if style == "positions":
            # Of as many as have been seen: rows are further apart at every step.
            args["position_ids"] = torch.arange(last).repeat(self._program.rows, 1)[:, first:]
        if style == "tuple":
            args["return_dict"] = False
        if style == "hidden":
            args["output_hidden_states"] = True
        if style == "embeds":
            with torch.no_grad():
                args["inputs_embeds"] = self._model.get_input_embeddings()(args.pop("input_ids"))
        return args

    def _act(self, wanted: str, at: int) -> None:
        for place, start, until, action in self._actions:
            due = {"between": at == start, "back": at == until}.get(place, True)
            if place != wanted or not due:
                continue
            try:
                action(self._model, self._user)
            except Exception as fault:  # noqa: BLE001 - compared
                self._trace.note(f"{place} {at} raised", (trace.kind_of(fault),))


def _autocast(is_on: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if is_on else contextlib.nullcontext()


def _wrapped(action: Any, inner: Any, model: Any, user: Any) -> Callable[[], Any]:
    return lambda: action(inner, model, user)


def _cache_in(out: Any) -> Any:
    values = out if isinstance(out, tuple) else out.values()
    return next((value for value in values if hasattr(value, "get_seq_length")), None)
