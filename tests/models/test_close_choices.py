"""Which positions are left out of a comparison in 16 bits, because a choice there was too close to call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import families_matrix
from support.families_choices import SLACK, Choice, Choices, safe
from support.families_matrix import OK, WRONG, Cell
from torch import nn

import liteboost_adaptor

ROWS, LENGTH = 2, 6


class Model(nn.Module):
    """Calls a function of scores."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, scores: torch.Tensor, input_ids: torch.Tensor) -> None:
        self.function(scores)


def made(function: Callable[[torch.Tensor], Any], *calls: torch.Tensor) -> list[Choice]:
    """The choices of calls of a model, one after another."""
    model = Model(function)
    with Choices(model) as choices:
        for scores in calls:
            model(scores, input_ids=torch.zeros(ROWS, scores.shape[-2], dtype=torch.long))
            function(scores)  # outside of the model: what ``generate`` does
    return choices.made


def gather(scores: torch.Tensor) -> torch.Tensor:
    return scores.gather(-1, scores.topk(2, dim=-1).indices)


#: Candidates 1 and 2 are the nearest, 1.0 apart.
CLEAR = torch.tensor([3.0, 2.0, 1.0, 0.0]).expand(ROWS, LENGTH, 4)
#: What rounding does to them.
ERROR = torch.tensor([0.01, -0.01, 0.01, -0.01])


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (gather, 1),
        (lambda x: x.argmax(-1).unsqueeze(-1), 1),
        (lambda x: x.gather(1, x.max(1, keepdim=True)[1]), 1),
        (lambda x: x.gather(-1, x.sort(-1).indices), 1),
        (lambda x: x.masked_fill(x > 0.5, 0.0), 1),
        (lambda x: x.max(-1).values + 1, 0),  # continuous
        (lambda x: x.topk(2, dim=-1).values.sum(-1), 0),
        (lambda x: torch.where(x > 0.5, x, 0.5), 0),
        (lambda x: x.gather(-1, x.topk(4, dim=-1).indices), 0),  # all of them
    ],
)
def test_what_counts_as_a_choice(function: Callable[[torch.Tensor], Any], count: int) -> None:
    assert len(made(function, CLEAR)) == count


def test_choices_of_unknown_kinds_are_an_error() -> None:
    with pytest.raises(NotImplementedError, match="kthvalue"):
        made(lambda x: x.kthvalue(2), CLEAR)


@pytest.mark.parametrize(("gap", "is_safe"), [(0.99, False), (1.01, True), (100.0, True)])
def test_a_gap_is_measured_by_the_error_of_the_original(gap: float, is_safe: bool) -> None:
    scores = CLEAR.clone()
    scores[1, 3, 1] = scores[1, 3, 2] + gap * 2 * SLACK * 0.01
    found = safe(made(gather, scores), made(gather, scores + ERROR), ROWS, LENGTH)
    expected = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    expected[1, 3:] = is_safe  # and what attends to it
    assert torch.equal(found, expected)


def test_a_choice_whose_scores_moved_further_is_measured_by_itself() -> None:
    error = ERROR.expand(ROWS, LENGTH, 4).clone()
    error[0, 2] *= 40
    found = safe(made(gather, CLEAR), made(gather, CLEAR + error), ROWS, LENGTH)
    assert found[0].tolist() == [True, True, False, False, False, False] and found[1].all()


def test_constants_are_never_close() -> None:
    scores = CLEAR.clone()
    scores[0, 2] = 0.0
    error = ERROR.expand(ROWS, LENGTH, 4).clone()
    error[0, 2] = 0.0
    assert safe(made(gather, scores), made(gather, scores + error), ROWS, LENGTH).all()


@pytest.mark.parametrize("shape", ["BSK", "(BS)K", "BHSK", "BSHK"])
def test_a_choice_is_found_at_its_position(shape: str) -> None:
    """Also one of several heads, which may stand before the positions or behind them."""
    heads = 3
    scores = CLEAR[:, :, None].expand(ROWS, LENGTH, heads, 4).clone()
    scores[1, 4, 1, 1] = scores[1, 4, 1, 2] + 1e-3
    scores = {
        "BSK": scores[:, :, 1],
        "(BS)K": scores[:, :, 1].flatten(0, 1),
        "BHSK": scores.transpose(1, 2),
        "BSHK": scores,
    }[shape]
    model = Model(gather)
    found = []
    for given in (scores, scores + ERROR):
        with Choices(model) as choices:
            model(given, input_ids=torch.zeros(ROWS, LENGTH))
        found.append(choices.made)
    is_safe = safe(*found, ROWS, LENGTH)
    assert is_safe.sum() == ROWS * LENGTH - 2 and not is_safe[1, 4:].any()


def test_steps_of_a_decode_follow_the_positions_of_its_prefill() -> None:
    steps = [CLEAR.clone(), *(CLEAR[:, :1].clone() for _ in range(3))]
    steps[2][1, 0, 1] = steps[2][1, 0, 2]
    found = safe(made(gather, *steps), made(gather, *(s + ERROR for s in steps)), ROWS, LENGTH, calls=4)
    assert found[0].all() and found[1].tolist() == [True] * (LENGTH + 1) + [False] * 2


@contextlib.contextmanager
def wrong_expert(model: nn.Module, level: int) -> Iterator[None]:
    """Served, and the first router takes its second choice's runner-up for the first token."""
    router = next(part for part in model.modules() if type(part).__name__.endswith("Router"))

    def exchange(module: nn.Module, args: tuple, outputs: tuple) -> tuple:
        *others, indices = outputs
        taken = indices[0].tolist()
        scores = others[0].reshape(-1, others[0].shape[-1])[0].clone()
        scores[taken] = -torch.inf
        indices = indices.clone()
        indices[0, -1] = scores.argmax()
        return *others, indices

    with PATCHED(model, level=level):
        hook = router.register_forward_hook(exchange)
        try:
            yield
        finally:
            hook.remove()


PATCHED = liteboost_adaptor.patched


@pytest.mark.parametrize(("family", "dtype"), [("mixtral", "bf16"), ("phimoe", "fp16")])
def test_a_wrong_expert_is_caught(family: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell(family, 64, "8/2", 7, dtype, level=2, seed=0)
    assert families_matrix.run(cell).verdict == OK
    monkeypatch.setattr(liteboost_adaptor, "patched", wrong_expert)
    result = families_matrix.run(cell)
    assert result.verdict == WRONG and result.kept > 0.1, str(result)
