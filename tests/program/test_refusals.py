"""What a step does that no program can is refused, and the status says which function, line and why."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import liteboost_adaptor
from liteboost_adaptor.program import bytecode, trusted_code
from liteboost_adaptor.program import step as steps

from .conftest import Pair, reasons, served

COUNTER = itertools.count()
TOTAL = 0


def with_values(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor([x.abs().max(), 2.0]).sum()


def with_a_global(norm: Any, x: torch.Tensor) -> torch.Tensor:
    global TOTAL  # noqa: PLW0603
    TOTAL = TOTAL + 1
    return x * TOTAL


def with_an_iterator(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return x * next(COUNTER)


def with_a_clock(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return x * (1.0 + time.time() * 0.0)


def with_an_import(norm: Any, x: torch.Tensor) -> torch.Tensor:
    import math

    return x * math.pi


def with_numpy(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return x * float(x.cpu().numpy().max())


def with_mapped_values(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return x * len(list(map(torch.Tensor.tolist, x)))


REFUSED: dict[Callable[..., Any], str] = {
    with_values: "takes a tensor of shape [2] that no operator has made",
    with_a_global: "with_a_global, line {2}: assigns the global TOTAL",
    with_an_iterator: "may use COUNTER, whose state cannot be seen (itertools.count)",
    with_a_clock: "with_a_clock, line {1}, calls time.time, which is in C and not known",
    with_an_import: "with_an_import, line {1}: imports math",
    with_numpy: "reads values (Tensor.numpy)",
    with_mapped_values: "reads values (torch's tolist)",
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_the_status_names_function_line_and_reason(function: Callable[..., Any]) -> None:
    pair = Pair()

    def using(model: torch.nn.Module) -> None:
        norm = model.model.norm

        class Using(type(norm)):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return function(self, super().forward(x))

        norm.__class__ = Using

    pair.both(using)
    pair.start()
    before = served()
    for _ in range(12):
        pair.step()
    assert served() == before
    first = function.__code__.co_firstlineno
    expected = REFUSED[function]
    for ahead in range(1, 5):
        expected = expected.replace(f"{{{ahead}}}", str(first + ahead))
    assert expected in reasons()
    liteboost_adaptor.undo()


def test_a_file_that_was_edited_has_to_be_read() -> None:
    """Code of transformers is known by the digest its release lists, not by its name."""
    from transformers.models.llama import modeling_llama

    code = modeling_llama.LlamaMLP.forward.__code__
    assert trusted_code.is_known(code, vars(modeling_llama))
    assert not trusted_code.is_known(code.replace(co_filename=__file__), vars(modeling_llama))
    assert not trusted_code.is_known(with_values.__code__, globals())


def test_names_and_instructions_are_read() -> None:
    def plain(self: Any, x: torch.Tensor) -> Any:
        return torch.relu(x.exp()) + getattr(self, "scale")  # noqa: B009

    names = bytecode.names_of(plain.__code__)
    assert names.globals == {"torch", "getattr"} and names.is_open
    assert {"relu", "exp", "scale"} <= names.all
    assert not bytecode.fault_of(plain.__code__)
    assert "assigns the global TOTAL" in bytecode.fault_of(with_a_global.__code__)


@pytest.mark.parametrize("at", range(-2, 3))
def test_what_raises_for_an_inference_tensor_has_written_to_it_once(at: int) -> None:
    pair = Pair()

    def count(model: Any) -> None:
        norm = model.model.norm
        norm.counts = False
        with torch.inference_mode():
            norm.seen = torch.zeros(1)

        class Counting(type(norm)):  # type: ignore[misc]
            def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
                if self.counts:
                    self.seen.add_(1)
                return super().forward(hidden_states)

        norm.__class__ = Counting

    pair.both(count)
    pair.start()
    pair.agree(steps.RECORDED_AT + at)
    ids = pair.tokens(1, 1)
    for model, cache in zip((pair.ours, pair.theirs), pair.caches, strict=True):
        model.model.norm.counts = True
        with pytest.raises(RuntimeError, match="inference tensor"):
            model(input_ids=ids, past_key_values=cache, use_cache=True)
        assert model.model.norm.seen.item() == 1
        model.model.norm.counts = False
    pair.agree(40)
