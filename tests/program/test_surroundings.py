"""What surrounds a recorded step: settings, objects that cannot be looked into, faults, reasons."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers.utils import output_capturing

from liteboost_adaptor.program import execution, state

from .conftest import Pair, reasons, served


@contextmanager
def precision(value: str) -> Iterator[None]:
    """Of products on a CPU, by the setting of which the older one cannot be asked any more."""
    backend = torch.backends.mkldnn.matmul
    former = backend.fp32_precision
    backend.fp32_precision = value
    try:
        yield
    finally:
        backend.fp32_precision = former


def test_precisions_are_asked_for_backend_by_backend() -> None:
    pair = Pair()
    pair.start()
    with precision("bf16"):
        before = served()
        pair.agree(10, tolerance=1e-2)
        assert served() > before


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.24"), reason="has no such warning")
def test_filters_of_warnings_count_where_a_step_warns() -> None:
    """`past_key_values=` has another name since transformers 5.24."""
    pair = Pair()
    pair.start()
    pair.agree(20)  # behind the first replays, beside which the original runs
    before = served()
    pair.agree()
    assert served() == before + 1
    ids = pair.tokens(1, 1)
    with warnings.catch_warnings():  # which makes a list of filters of its own
        warnings.simplefilter("error")
        for model, cache in zip((pair.ours, pair.theirs), pair.caches, strict=True):
            with pytest.raises(FutureWarning, match="past_key_values"):
                model(input_ids=ids, past_key_values=cache, use_cache=True)
    with warnings.catch_warnings(record=True) as kept:  # of equal filters
        pair.agree()
    assert sum("past_key_values" in str(each.message) for each in kept) == 2
    before = served()
    pair.agree(3)  # nothing is recorded again
    assert served() == before + 3


class Shy(dict):
    """Shows nobody what is in it but by key."""

    def items(self) -> Any:
        raise RuntimeError("shy")

    def __len__(self) -> int:
        raise RuntimeError("shy")


class Secret:
    """Says nothing of itself."""

    def __hash__(self) -> int:
        return 1

    def __repr__(self) -> str:
        raise RuntimeError("secret")


@pytest.mark.parametrize("kept", [Shy(scale=1.5), {"scale": 1.5, "of": {Secret(), 1}}])
def test_objects_that_raise_when_they_are_looked_at_fault_no_call(kept: dict[str, Any]) -> None:
    pair = Pair()

    def scaled(module: nn.Module) -> None:
        inner = module.model.norm

        class Scaled(type(inner)):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) * kept["scale"]

        inner.__class__ = Scaled

    pair.both(scaled)
    pair.start()
    pair.agree(8)
    kept["scale"] = 0.5
    pair.agree(8)


class Counting(nn.Module):
    """Writes to its buffer in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(0.1).mul_(1.0)
        return x + self.total


def test_who_asks_for_versions_or_for_gradients_sees_what_replays_write() -> None:
    pair = Pair()

    def counting(module: nn.Module) -> Counting:
        made = Counting()
        module.model.layers[0].mlp = nn.Sequential(made, module.model.layers[0].mlp)
        return made

    ours, theirs = pair.both(counting)
    pair.start()
    before = served()
    pair.agree(20)
    assert served() > before + 10
    assert ours.total._version == theirs.total._version
    weight = torch.ones(64, requires_grad=True)
    with torch.enable_grad():
        loss = (weight * ours.total).sum()
    pair.agree(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_versions_are_those_of_one_run_where_a_step_is_taken_back() -> None:
    """A recording that is refused after it has run has the step made again."""
    pair = Pair()

    def counting(module: nn.Module) -> Counting:
        made = Counting()
        module.model.layers[0].mlp = nn.Sequential(made, module.model.layers[0].mlp)
        inner = module.model.norm

        class Flags(type(inner)):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.last = x  # no program has an instruction for it, and what it keeps is a tracked tensor
                return super().forward(x)

        inner.__class__ = Flags
        return made

    ours, theirs = pair.both(counting)
    pair.start()
    for _ in range(12):
        pair.agree(1)
        assert ours.total._version == theirs.total._version


class Stop(BaseException):
    """What a tool ends a forward by."""


def test_a_step_that_raises_leaves_what_it_leaves_without_us() -> None:
    """Behind all layers, in a step that is recorded (the fourth) and in replays: caught, and gone on from."""
    pair = Pair()

    def stopping(module: nn.Module) -> None:
        inner = module.model.norm
        inner.steps = []

        class Stopping(type(inner)):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.steps.append(x.shape[1])
                if len(self.steps) == 5:
                    raise Stop
                return super().forward(x)

        inner.__class__ = Stopping

    pair.both(stopping)
    pair.start()
    pair.agree(3)
    ids = pair.tokens(1, 1)
    for model, cache in zip((pair.ours, pair.theirs), pair.caches, strict=True):
        with pytest.raises(Stop):
            model(input_ids=ids, past_key_values=cache, use_cache=True)
    assert pair.caches[0].get_seq_length() == pair.caches[1].get_seq_length()
    assert pair.ours.model.norm.steps == pair.theirs.model.norm.steps
    pair.agree(8)


def test_a_replay_that_raises_leaves_what_the_step_leaves() -> None:
    pair = Pair()

    def looked_up(module: nn.Module) -> None:
        inner = module.model.norm
        inner.register_buffer("table", torch.ones(40))

        class Looking(type(inner)):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) * self.table[self.row]

        inner.__class__ = Looking
        inner.register_buffer("row", torch.zeros(1, dtype=torch.long))

    pair.both(looked_up)
    pair.start()
    before = served()
    pair.agree(10)
    assert served() > before
    for at in (99, 0):
        for model in (pair.ours, pair.theirs):
            model.model.norm.row.fill_(at)
        if not at:
            break
        ids = pair.tokens(1, 1)
        for model, cache in zip((pair.ours, pair.theirs), pair.caches, strict=True):
            with pytest.raises(IndexError):
                model(input_ids=ids, past_key_values=cache, use_cache=True)
    assert any(reason.startswith("a replay raised") for reason in reasons())
    assert pair.caches[0].get_seq_length() == pair.caches[1].get_seq_length() == 9 + 11
    pair.agree(8)


def test_the_status_says_why_nothing_is_recorded_at_the_moment() -> None:
    pair = Pair()
    pair.start()
    handle = pair.ours.model.norm.register_forward_hook(lambda module, args, made: None)
    pair.agree(6)
    handle.remove()
    assert any(reason.startswith("a module has hooks") for reason in reasons())
    pair = Pair()
    pair.start()
    for _ in range(16):
        pair.agree(1)
        assert pair.caches[0].layers[0].keys.shape[2]
    assert any("of the cache were taken from it" in reason for reason in reasons())
    pair = Pair()
    mask = torch.zeros(1, 1, 1, 10)
    pair.start()
    for at in range(4):
        pair.agree(1, attention_mask=mask.new_zeros(1, 1, 1, 10 + at))
    assert any(reason.startswith("attention_mask of 4 dimensions") for reason in reasons())


def captured() -> Pair:
    """Models that decode, and whose hidden states somebody wanted before."""
    pair = Pair()
    for model in (pair.ours, pair.theirs):
        model(pair.tokens(1, 5), output_hidden_states=True)
    pair.start()
    pair.agree(8)
    return pair


def test_hooks_that_transformers_has_left_end_nothing() -> None:
    """It captures hidden states by them; they stay, and act where a forward, or one around it, collects."""
    pair = captured()
    before = served()
    pair.agree(4)
    assert served() == before + 4
    for _ in range(8):
        ours, theirs = pair.step(output_hidden_states=True)
        assert len(ours.hidden_states) == len(theirs.hidden_states) == 3
        for one, other in zip(ours.hidden_states, theirs.hidden_states, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_forward_around_it_collects_what_it_wants() -> None:
    """A model of several parts that hands out hidden states calls its language model, whose hooks act."""
    pair = captured()
    before = served()
    token = output_capturing._active_collector.set({"hidden_states": []})
    pair.agree(1)
    output_capturing._active_collector.reset(token)
    assert served() == before


def test_a_handler_of_signals_runs_though_nobody_has_read_it() -> None:
    """It would not be called again; other code that was not foreseen does not run at all."""
    ran: list[str] = []

    def handler(number: int, frame: Any) -> None:
        ran.append("handler")

    def other() -> None:
        ran.append("other")

    def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        for _ in range(1000):
            pass
        other()

    former = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(execution.Unforeseen), execution.observed({interrupted.__code__}):
            interrupted()
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert ran == ["handler"]


def test_the_precision_of_fp32_in_torch_before_2_9(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_get_fp32_precision_getter", raising=False)
    before = state._process()
    monkeypatch.setattr(torch._C, "_get_float32_matmul_precision", lambda: "medium")
    assert state._process() != before
