"""Programs composed of idioms give with recorded steps what they give without them, to the bit.

And what they give on our ops is what transformers gives. What they are made of is in ``soundness/``;
``PYTHONPATH=tests python -m program.soundness`` runs thousands and reduces those that differ.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from .soundness import bases, campaign, execute, trace
from .soundness.idiom import catalogue
from .soundness.program import Program, alone, bases_of, programs
from .soundness.world import as_found

#: Programs that once differed, reduced.
KEPT = json.loads((Path(__file__).parent / "soundness" / "kept.json").read_text())
#: Orders of the idioms in the first tier, and programs composed out of each.
ORDERS, COMPOSED = 6, 4
#: Of the second: LITEBOOST variables are dropped before tests, so this one has no such prefix.
MANY = int(os.environ.get("SOUNDNESS_PROGRAMS", "20000"))
_SETTINGS: dict[str, Any] = {
    "database": None,
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
}


def check(program: Program) -> execute.Outcome:
    """Run it; an error names the program, so that it can be kept."""
    outcome = execute.run(program)
    assert not outcome.fault, f"{campaign.kind_of(outcome)}: {outcome.fault}\n{program.to_json()}"
    return outcome


def composed(program: Program) -> None:
    check(program)


def _kept() -> Iterator[Any]:
    """Three of four in the first tier."""
    for number, kept in enumerate(KEPT):
        marks = pytest.mark.full if number % 4 == 3 else ()
        yield pytest.param(kept["program"], id=f"{number} {' + '.join(kept['reduced'])}", marks=marks)


@pytest.mark.parametrize("kept", list(_kept()))
def test_what_once_differed_does_not(kept: dict[str, Any]) -> None:
    check(Program.of(kept))


@pytest.mark.parametrize("number", range(ORDERS))
def test_composed_programs_give_the_same(number: int) -> None:
    campaign.composed(composed, COMPOSED, number)


@pytest.mark.parametrize("base", bases.BASES)
def test_a_plain_program_is_replayed(base: str) -> None:
    """A comparison that never runs a recorded step would prove nothing."""
    program = Program(base, 2, 1, "keywords", "plain", False, ())
    assert check(program).replays >= 40


@pytest.mark.parametrize("style", ["keywords", "mask", "positions", "positional", "tuple"])
def test_a_batch_is_replayed_or_it_is_said_why_not(style: str) -> None:
    outcome = check(Program("llama", 1, 2, style, "plain", False, ()))
    assert outcome.replays >= 40 or outcome.reasons


def test_idioms_are_many_and_run_without_us() -> None:
    assert len(catalogue()) >= 60
    for idiom in catalogue().values():
        for base in bases_of(idiom.name):
            compile(alone(idiom.name, base).source(), idiom.name, "exec")


def _trace(value: Any) -> trace.Trace:
    made = trace.Trace()
    made.note("value", value)
    return made


def _output(**extra: Any) -> CausalLMOutputWithPast:
    output = CausalLMOutputWithPast(logits=torch.ones(2))
    vars(output).update(extra)
    return output


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([1.0]), torch.tensor([1.0]).nextafter(torch.tensor([2.0]))),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([float("nan")]), torch.tensor([1.0])),
        (torch.ones(1), torch.ones(1, 1)),
        (torch.ones(1), torch.ones(1, dtype=torch.float64)),
        (_output(value=torch.ones(1)), _output()),
        (_output(value=torch.ones(1)), _output(value=torch.zeros(1))),
        ([1, 2], [1, 2, 3]),
        (True, 1),
    ],
    ids=str,
)
def test_traces_that_differ_are_told_apart(one: Any, other: Any) -> None:
    assert trace.first_difference(_trace(one), _trace(other))
    assert not trace.first_difference(_trace(one), _trace(one))


def test_what_is_lost_of_nan_and_infinity_is_no_rounding() -> None:
    for lost in (float("nan"), float("inf")):
        values = torch.tensor([1.0, lost]), torch.tensor([1.0, 0.0])
        assert trace.first_difference(*map(_trace, values), tolerance=1e-4)
    assert not trace.first_difference(_trace(torch.ones(3)), _trace(torch.ones(3) + 1e-6), tolerance=1e-4)


def test_the_process_is_left_as_found() -> None:
    linear, update, sdpa = F.linear, DynamicLayer.update, ALL_ATTENTION_FUNCTIONS["sdpa"]
    with as_found():
        F.linear, DynamicLayer.update = abs, abs
        DynamicLayer.crop_twice = abs
        AttentionInterface.register("sdpa", abs)
        torch.set_default_dtype(torch.float64)
        os.environ["SOUND"] = "1"
    assert F.linear is linear and DynamicLayer.update is update and ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa
    assert not hasattr(DynamicLayer, "crop_twice") and "SOUND" not in os.environ
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(catalogue()))
def test_an_idiom_alone_gives_the_same(name: str) -> None:
    for base in bases_of(name):
        outcome = check(alone(name, base))
        assert catalogue()[name].raises or not outcome.raised


@pytest.mark.full
@settings(max_examples=300, **_SETTINGS)
@given(st.data())
def test_shrunk_programs_of_any_seed_give_the_same(data: st.DataObject) -> None:
    check(data.draw(programs()))


@pytest.mark.full
def test_many_programs_give_the_same(tmp_path: Path) -> None:
    summary = campaign.campaign(MANY, 1, os.cpu_count() or 1, tmp_path)
    assert summary.programs == MANY
    assert summary.replayed > MANY // 10
    assert not summary.findings, "\n".join(summary.lines())
