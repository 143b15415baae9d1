"""Tiny random models of the families served: numbers against the original, and which path ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import calls, numbers, tiny_models

import liteboost_adaptor
from liteboost_adaptor.program import reasons

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "olmo2", "gpt_oss")
TOLERANCE = 2e-5
SEEDS = (0, 1, 2)
#: Below this share of the largest router logit, bf16 rounding may choose another expert.
ROUTER_MARGIN = 2.0**-6

Inputs = dict[str, Any]


def prefill_inputs(model: torch.nn.Module) -> Inputs:
    return tiny_models.example_inputs(model, batch=2, length=12)


PHASES: dict[str, Callable[[torch.nn.Module], Inputs]] = {
    "prefill": prefill_inputs,
    "left-padded batch": numbers.padded_inputs,
}


@torch.no_grad()
def logits(model: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
    return model(**inputs).logits


def real(found: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Rows of ``found`` at positions that are not padding; what padding computes is nobody's business."""
    return found[inputs["attention_mask"].bool()]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_logits_are_the_originals_within_rounding(family: str, phase: str) -> None:
    model = tiny_models.build(family)
    inputs = PHASES[phase](model)
    expected = logits(model, inputs)
    liteboost_adaptor.apply(model)
    found = logits(model, inputs)
    assert numbers.relative(real(found, inputs), real(expected, inputs)) <= TOLERANCE
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_greedy_tokens_and_their_logits_are_the_originals(family: str) -> None:
    model = tiny_models.build(family)
    inputs = numbers.padded_inputs(model)
    expected = numbers.greedy(model, inputs)
    liteboost_adaptor.apply(model)
    with calls.served() as served:
        found = numbers.greedy(model, inputs)
    certain = numbers.certain(expected, 2 * TOLERANCE * expected.logits.abs().max().item())
    assert certain.float().mean() > 0.5, "the model is too undecided to show anything"
    assert torch.equal(found.tokens[certain], expected.tokens[certain])
    # Logits of a step follow from the tokens before it, so they compare where those are certain.
    assert numbers.relative(found.logits[certain], expected.logits[certain]) <= TOLERANCE
    assert served.kinds["attention"] > 0


@torch.no_grad()
def stepwise(model: torch.nn.Module, inputs: Inputs, prefix: int = 8) -> torch.Tensor:
    """Logits of every position: some in one go, the rest a token at a time with a cache."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    out = model(input_ids=ids[:, :prefix], attention_mask=mask[:, :prefix], use_cache=True)
    found = [out.logits]
    for end in range(prefix + 1, ids.shape[1] + 1):
        out = model(
            input_ids=ids[:, end - 1 : end],
            attention_mask=mask[:, :end],
            past_key_values=out.past_key_values,
            use_cache=True,
        )
        found.append(out.logits)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("run", [logits, stepwise], ids=["in one go", "cached decode"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_as_near_to_float64_as_the_original(
    family: str, run: Callable[..., torch.Tensor], record_property: Callable[..., None]
) -> None:
    ours, originals, wanted, excluded = [], [], [], 0
    for seed in SEEDS:
        model = numbers.cast(tiny_models.build(family, seed), torch.bfloat16)
        inputs = numbers.padded_inputs(model, seed=seed)
        reference = numbers.exact(model, family, inputs)
        real_positions = inputs["attention_mask"].bool()
        kept = real_positions & (reference.margins > ROUTER_MARGIN)
        excluded += int((real_positions & ~kept).sum())
        originals.append(run(model, inputs)[kept].double())
        liteboost_adaptor.apply(model)
        ours.append(run(model, inputs)[kept].double())
        wanted.append(reference.logits[kept])
        liteboost_adaptor.undo()
    oracle = torch.cat(wanted)
    distance = (torch.cat(ours) - oracle).norm() / oracle.norm()
    own = (torch.cat(originals) - oracle).norm() / oracle.norm()
    record_property("positions excluded for their router margin", excluded)
    assert len(oracle) >= 20, f"{excluded} positions excluded, {len(oracle)} left: too few to show anything"
    assert distance <= max(1.5 * own.item(), numbers.ULP[torch.bfloat16]), (
        f"ours {distance:.2e}, original {own:.2e}"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_call_goes_through_our_ops(family: str) -> None:
    """Originals are called never, replacements exactly as often as the unpatched model calls originals."""
    model = tiny_models.build(family)
    inputs = numbers.padded_inputs(model)
    codes = calls.originals(model)
    assert set(codes.values()) == set(calls.KINDS)

    def run() -> None:
        logits(model, inputs)
        numbers.greedy(model, inputs, steps=3)

    _, expected = calls.count(codes, run)
    status = liteboost_adaptor.apply(model)
    assert not [row for row in status.rules if row.state in ("refused", "failed", "foreign")], str(status)
    with calls.served() as served:
        _, left = calls.count(codes, run)
    # To count calls is to watch what Python does: no step is recorded.
    assert served.fallbacks.keys() <= {(calls.STEPS, reasons.LOOKED_AT)}
    linear = left.pop("linear", 0)
    assert left == {}
    assert served.kinds["linear"] + linear == expected["linear"]
    for kind in ("norm", "rope", "activation", "attention"):
        assert served.kinds[kind] == expected[kind] > 0, kind


@pytest.mark.parametrize("family", FAMILIES)
def test_level_0_is_bit_identical(family: str) -> None:
    model = tiny_models.build(family)
    inputs = numbers.padded_inputs(model)
    codes = calls.originals(model)
    expected, before = calls.count(codes, lambda: logits(model, inputs))
    liteboost_adaptor.apply(model, level=0)
    with calls.served() as served:
        found, after = calls.count(codes, lambda: logits(model, inputs))
    assert torch.equal(found, expected)
    assert after == before
    assert served.rules == {}


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_fp16_is_as_near_to_float64_as_the_original(family: str) -> None:
    model = numbers.cast(tiny_models.build(family), torch.float16)
    inputs = numbers.padded_inputs(model)
    exact = real(numbers.exact(model, family, inputs).logits, inputs)
    own = real(logits(model, inputs), inputs).double()
    liteboost_adaptor.apply(model)
    with calls.served() as served:
        ours = real(logits(model, inputs), inputs).double()
    assert (ours - exact).norm() <= max(1.5 * (own - exact).norm(), numbers.ULP[torch.float16] * exact.norm())
    assert served.fallbacks == {} and served.kinds["attention"] > 0


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_sliding_windows_and_long_rows(family: str) -> None:
    """Longer than the window (8) and than any block, at lengths that divide nothing."""
    model = tiny_models.build(family)
    inputs = numbers.padded_inputs(model, paddings=(0, 37, 5), length=131)
    expected = logits(model, inputs)
    liteboost_adaptor.apply(model)
    assert numbers.relative(real(logits(model, inputs), inputs), real(expected, inputs)) <= TOLERANCE


def test_float64_takes_the_original_code_and_is_counted() -> None:
    model = tiny_models.build("llama").double()
    inputs = prefill_inputs(model)
    expected = logits(model, inputs)
    liteboost_adaptor.apply(model)
    with calls.served() as served:
        assert torch.equal(logits(model, inputs), expected)
    assert served.rules == {}
    assert {why for _, why in served.fallbacks} == {"dtype float64"}
