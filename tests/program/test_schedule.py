"""When a step is recorded: as soon as that pays, and seldom where it has not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import families, tiny_models
from transformers import LogitsProcessor, LogitsProcessorList

import liteboost_adaptor
from liteboost_adaptor.program import schedule
from liteboost_adaptor.program import step as steps

from .conftest import Pair, reasons, served


@pytest.mark.parametrize(
    ("seen", "to_come", "in_vain", "expected"),
    [
        (62, 0, 0, 0),
        (63, 0, 0, 64),
        (80, 0, 0, 80),
        (1, 400, 0, 0),
        (2, 400, 0, 3),
        (3, 124, 0, 3),
        (2, 60, 0, 0),
        (63, 0, 1, 64),
        (64, 0, 2, 0),
        (127, 0, 2, 128),
        (3, 100, 3, 0),
        (64 << 5, 0, 99, 64 << 5),
    ],
)
def test_a_step_is_recorded_when_as_many_are_likely_to_come_as_it_takes_to_pay(
    seen: int, to_come: int, in_vain: int, expected: int
) -> None:
    assert schedule.recorded_at(seen, to_come, 64, in_vain) == expected


class _Asks(LogitsProcessor):
    def __init__(self) -> None:
        self.told: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.told.append(schedule.steps_to_come())
        return scores


# Beam search keeps the prompt where samples keep what is written so far: the limit of the whole text, then.
@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, [6, 5, 4, 3, 2, 1]), ({"do_sample": True}, [6, 5, 4, 3, 2, 1]), ({"num_beams": 2}, [6] * 6)],
    ids=["greedy", "sampling", "beams"],
)
def test_how_many_tokens_generate_may_still_make_is_known(
    settings: dict[str, Any], expected: list[int]
) -> None:
    assert _told(settings) == expected
    assert schedule.steps_to_come() == 0


def _told(settings: dict[str, Any]) -> list[int]:
    model, asks = tiny_models.build("llama"), _Asks()
    inputs = families.inputs_of(model, 5, (0,))
    options = {"max_new_tokens": 6, "eos_token_id": None, "logits_processor": LogitsProcessorList([asks])}
    model.generate(**inputs, **{"do_sample": False} | options | settings)
    return asks.told


def test_tokens_that_are_checked_several_at_a_time_do_not_count() -> None:
    assert set(_told({"prompt_lookup_num_tokens": 2})) == {0}


def test_a_long_text_is_recorded_at_once_and_a_short_one_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "RECORDED_AT", 12)
    liteboost_adaptor.undo()
    model = tiny_models.build("llama")
    liteboost_adaptor.apply(model, level=2)
    inputs = families.inputs_of(model, 5, (0,))
    for new, expected in ((10, 0), (30, 30 - 1 - 3)):
        before = served()
        model.generate(**inputs, max_new_tokens=new, eos_token_id=None, do_sample=False)
        assert served() - before == expected, reasons()
        liteboost_adaptor.undo(model)
        liteboost_adaptor.apply(model, level=2)


def test_each_program_that_has_not_paid_makes_the_next_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "RECORDED_AT", 5)
    pair = Pair()
    expected = {1: 5, 2: 5, 3: 10, 4: 20}  # the first two serve two steps each
    for rows, wait in expected.items():
        pair.start(rows)
        before = served()
        pair.agree(wait, rows)
        assert served() == before
        pair.agree(2, rows)
        assert served() == before + 2, (rows, reasons())
    pair.start(1)
    pair.agree(8)  # now the first one has paid
    pair.start(5)
    before = served()
    pair.agree(10, 5)
    assert served() == before
    pair.agree(1, 5)


def test_what_was_recorded_in_another_state_is_watched_anew(recorded: Pair) -> None:
    """Other functions run now: to record without it would fail, and cost as much as a recording."""
    for model in (recorded.ours, recorded.theirs):
        model(recorded.tokens(1, 4), output_hidden_states=True)
    before, failed = served(), reasons().get("runs functions that the step before did not", 0)
    recorded.agree(12)
    assert served() > before
    assert reasons().get("runs functions that the step before did not", 0) == failed


def test_no_step_is_recorded_in_vain_while_beams_exchange_what_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, tried, record = Pair(), [], steps.Steps._record
    monkeypatch.setattr(steps.Steps, "_record", lambda *args: (tried.append(1), record(*args))[1])
    pair.start(3)
    for _ in range(40):
        pair.agree(1, 3)
        for cache in pair.caches:
            cache.reorder_cache(torch.tensor([1, 2, 0]))
    assert not tried
    before = served()
    pair.agree(4, 3)
    assert served() > before, reasons()


def test_texts_that_are_shorter_than_the_wait_are_recorded_wherever_it_ends() -> None:
    for first in range(1, 4):  # steps before texts of three steps: one of them waits until a text begins
        pair = Pair()
        pair.start()
        pair.agree(first)
        before = served()
        for _ in range(4):
            pair.start()
            pair.agree(3)
        assert served() - before >= 3, (first, reasons())
