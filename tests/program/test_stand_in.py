"""Keywords that no forward reads may be given any object; who reads one takes the original."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from liteboost_adaptor.program import reasons as words
from liteboost_adaptor.program.stand_in import ReadsArgument, StandIn, StandIns

from .conftest import Pair, reasons, served


class Tokenizer:
    """What ``stop_strings`` of ``generate`` wants, and hands on to the forward."""


def test_objects_that_nobody_reads_are_served() -> None:
    pair = Pair()
    pair.start()
    pair.agree(4, tokenizer=Tokenizer(), stop_strings=["a"])
    before = served()
    pair.agree(5, tokenizer=Tokenizer(), stop_strings=["b", "c"])
    assert served() == before + 5


def test_an_object_of_another_type_is_recorded_anew() -> None:
    pair = Pair()
    pair.start()
    pair.agree(6, tokenizer=Tokenizer())
    before, new = served(), reasons()[words.NEW]
    pair.agree(2, tokenizer=object())
    assert served() == before and reasons()[words.NEW] == new + 2


def test_an_object_that_is_read_takes_the_original() -> None:
    """A list of layers whose hidden states are wanted."""
    pair = Pair()
    pair.start()
    before = served()
    for _ in range(12):
        ours, theirs = pair.step(output_hidden_states=[1])
        assert [each is None for each in ours.hidden_states] == [
            each is None for each in theirs.hidden_states
        ]
    assert served() == before
    assert any(reason.startswith("reads output_hidden_states") for reason in reasons())


def test_code_that_has_to_be_read_may_ask_for_the_object() -> None:
    pair = Pair()

    def asking(model: torch.nn.Module) -> None:
        inner = model.model.layers[0].mlp

        class Asking(type(inner)):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x)

        inner.__class__ = Asking

    pair.both(asking)
    pair.start()
    pair.agree(8)
    before = served()
    pair.agree(8, tokenizer=Tokenizer())
    assert served() == before
    assert any(each.startswith("tokenizer is given as a Tokenizer") for each in reasons())


@pytest.mark.parametrize(
    "ask",
    [
        *(bool, len, iter, hash, repr, callable, copy.copy, lambda each: each == 1, lambda each: each + 1),
        *(lambda each: each[0], lambda each: each.name, lambda each: isinstance(each, list)),
        *(lambda each: setattr(each, "name", 1), lambda each: hasattr(each, "shape"), torch.is_tensor),
    ],
)
def test_who_asks_a_stand_in_is_noted(ask: Callable[[Any], Any]) -> None:
    stand_ins = StandIns()
    made = stand_ins.of("tokenizer")
    if ask is callable:
        with pytest.raises(ReadsArgument):
            made()
    else:
        with pytest.raises(ReadsArgument, match="reads tokenizer"):
            ask(made)
    assert stand_ins.fault() == "reads tokenizer"


def test_who_keeps_a_stand_in_is_noted() -> None:
    stand_ins = StandIns()
    kept: list[StandIn] = []

    def step(**kwargs: Any) -> None:
        assert kwargs["tokenizer"] is not None

    step(tokenizer=stand_ins.of("tokenizer"))
    assert stand_ins.fault() == ""
    kept.append(stand_ins.of("stop_strings"))
    assert stand_ins.fault() == "keeps stop_strings"
