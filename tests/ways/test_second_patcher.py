"""Another library patches a class of the model: its code runs, and the status names what was left to it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support import calls, numbers, state, tiny_models
from support.ways import families
from torch import nn
from torch.nn.utils import parametrize

import liteboost_adaptor

FAMILIES = ("llama", "qwen3", "gemma2", "mixtral", "phi3", "gpt_oss", "qwen3_next", "deepseek_v3", "mamba2")


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(**numbers.padded_inputs(model)).logits


def part(model: nn.Module, kind: str) -> type:
    """The class of the first norm, or of the first layer, of ``model``."""
    if kind == "layer":
        return type(next(each for each in model.modules() if isinstance(each, nn.ModuleList))[0])
    return next(type(each) for each in model.modules() if type(each).__name__.endswith(kind))


@contextmanager
def patched(cls: type, seen: list[int]) -> Iterator[Callable[..., Any]]:
    """What other libraries do: a wrapper around ``forward``, set on the class."""
    original = vars(cls)["forward"]

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return original(self, *args, **kwargs)

    cls.forward = forward
    try:
        yield forward
    finally:
        cls.forward = original


@pytest.mark.parametrize("kind", ["RMSNorm", "layer"])
@families(*FAMILIES)
def test_theirs_before_us_runs_and_is_named(family: str, kind: str, level: int) -> None:
    model = tiny_models.build(family)
    cls, seen = part(model, kind), []
    expected = logits(model)
    with patched(cls, seen) as theirs:
        logits(model)
        wanted = len(seen)
        liteboost_adaptor.apply(model, level=level)
        seen.clear()
        with calls.served() as served:
            assert numbers.relative(logits(model), expected) <= 2e-5
        assert len(seen) == wanted > 0
        assert served.kinds["linear"] > 0, "the rest of the model is not served"
        rows = [row for row in liteboost_adaptor.status().rules if row.state == "foreign"]
        named = {target.split(": ")[0] for row in rows for target in row.where}
        assert f"{cls.__module__}:{cls.__qualname__}" in named, "the status does not name it"
        liteboost_adaptor.undo(model)
        assert vars(cls)["forward"] is theirs
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("kind", ["RMSNorm", "layer"])
@families(*FAMILIES)
def test_theirs_after_us_runs_as_often_as_without_us(family: str, kind: str, level: int) -> None:
    model = tiny_models.build(family)
    cls, seen = part(model, kind), []
    expected = logits(model)
    with patched(cls, seen):
        logits(model)
    wanted = len(seen)
    liteboost_adaptor.apply(model, level=level)
    logits(model)
    with patched(cls, seen) as theirs:
        seen.clear()
        assert numbers.relative(logits(model), expected) <= 2e-5
        assert len(seen) == wanted > 0
        liteboost_adaptor.undo(model)
        assert vars(cls)["forward"] is theirs
    assert torch.equal(logits(model), expected)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


@families("llama", "qwen3", "gemma2", "gpt_oss", "gpt2", "mamba2")
def test_a_parametrization_set_while_served_counts_and_outlives_undo(family: str, level: int) -> None:
    """torch puts a class of its own on top of ours: undo takes ours out from beneath it."""
    reference, model = tiny_models.build(family), tiny_models.build(family)
    plain = logits(reference)
    liteboost_adaptor.apply(model, level=level)
    logits(model)
    norms = [next(p for p in each.modules() if "Norm" in type(p).__name__) for each in (reference, model)]
    for norm in norms:
        parametrize.register_parametrization(norm, "weight", Doubled())
    expected = logits(reference)
    assert numbers.relative(expected, plain) > 1e-3
    assert numbers.relative(logits(model), expected) <= 2e-5
    assert liteboost_adaptor.undo(model) == []
    with calls.served() as served:
        assert torch.equal(logits(model), expected)
    assert served.rules == {}
    assert state.rows() == {}
    for norm in norms:
        parametrize.remove_parametrizations(norm, "weight", leave_parametrized=False)
    assert type(norms[1]) is type(norms[0])
    assert torch.equal(logits(model), plain)
