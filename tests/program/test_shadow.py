"""Shadow checks: a program that gives anything else than the original is found out, and never seen."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import liteboost_adaptor
from liteboost_adaptor.errors import StrictError
from liteboost_adaptor.program import program, shadow

from .conftest import Pair, reasons, served

CHECKED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3072)


def test_the_runs_that_are_checked() -> None:
    assert tuple(run + 1 for run in range(3072) if shadow.is_due(run)) == CHECKED


def spoiled(change: Any) -> Any:
    """`Program.run`, with ``change`` made to what it gives."""
    original = program.Program.run

    def run(self: Any, *args: Any) -> Any:
        found = original(self, *args)
        if found is not None:
            change(found)
        return found

    return run


def flip(tensor: torch.Tensor) -> None:
    """The lowest bit of the last value is another."""
    tensor.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)


def last_row(run: Any) -> torch.Tensor:
    _, room, count = run.appended[-1]
    return room.memory.narrow(room.dim, room.end, count)[0, 0, 0]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda run: flip(run.results[0]), "the result.logits"),
        (lambda run: flip(last_row(run)), "values of the cache"),
    ],
    ids=["a bit of the logits", "a bit of what is kept"],
)
def test_one_bit_drops_the_program(
    change: Any, named: str, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair()
    pair.start()
    pair.agree(4)
    monkeypatch.setattr(program.Program, "run", spoiled(change))
    before = served()
    pair.agree(1)
    assert len(warned) == 1 and warned[0].startswith("RuntimeWarning: ")
    assert f"gave another {named}" in warned[0]
    assert any(reason.endswith(named) for reason in reasons())
    monkeypatch.undo()
    pair.agree(10)
    assert served() == before
    liteboost_adaptor.undo()


def test_strict_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    liteboost_adaptor.apply(pair.ours, level=2, strict=True)
    pair.start()
    pair.agree(4)
    monkeypatch.setattr(program.Program, "run", spoiled(lambda run: flip(run.results[0])))
    with pytest.raises(StrictError, match=r"logits"):
        pair.step()
    liteboost_adaptor.undo()


def test_what_a_step_writes_in_place_is_written_once() -> None:
    """A buffer that counts: the program runs beside the original, and both count."""

    def counting(model: torch.nn.Module) -> None:
        norm = model.model.norm
        norm.register_buffer("steps", torch.zeros(1))

        class Counting(type(norm)):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.steps.add_(1)
                return super().forward(x) * self.steps

        norm.__class__ = Counting

    pair = Pair()
    pair.both(counting)
    pair.start()
    before = served()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
        pair.agree(20)
    assert served() > before
    assert torch.equal(pair.ours.model.norm.steps, torch.tensor([21.0]))
    liteboost_adaptor.undo()
