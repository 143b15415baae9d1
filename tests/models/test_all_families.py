"""Every causal-LM family of the installed transformers, whether or not a rule is meant for it."""

from __future__ import annotations

import pytest
import torch
from support import families, numbers, state, tiny_models

import liteboost_adaptor

TOLERANCE = 2e-5
FAMILIES = families.buildable()


@pytest.mark.parametrize("family", sorted(families.NOT_BUILDABLE))
def test_families_left_out_cannot_be_built(family: str) -> None:
    with pytest.raises((ImportError, ValueError)):
        tiny_models.build(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_logits_and_greedy_tokens_are_the_originals_at_every_level(family: str) -> None:
    """Prefill, and eight cached steps of a left-padded batch of three; level 0 to the bit."""
    model = tiny_models.build(family)
    plain = families.inputs_of(model, 12, (0, 0))
    padded = families.inputs_of(model, 13, (0, 3, 6))
    expected = families.prefill(model, plain)
    tokens, steps = families.decode(model, padded, 8)
    # Tokens are the original's unless two logits are nearer than the tolerance; what follows may differ then.
    certain = numbers.certain(numbers.Greedy(tokens, steps), 2 * TOLERANCE * steps.abs().max().item())
    for level in (0, 1, 2):
        liteboost_adaptor.apply(model, level=level)
        found = families.prefill(model, plain)
        greedy, found_steps = families.decode(model, padded, 8)
        if not torch.equal(greedy, tokens):
            assert torch.equal(greedy[certain], tokens[certain]), f"level {level}"
            _, found_steps = families.decode(model, padded, 8, forced=tokens)
        if level == 0:
            assert torch.equal(found, expected) and torch.equal(found_steps, steps)
        rows = state.rows()
        assert "failed" not in rows, [row.reason for row in rows["failed"]]
        assert numbers.relative(found, expected) <= TOLERANCE, f"prefill, level {level}"
        assert numbers.relative(found_steps, steps) <= TOLERANCE, f"cached decode, level {level}"
    liteboost_adaptor.undo()
    assert not any("__liteboost__" in vars(type(part)) for part in model.modules())
    assert torch.equal(families.prefill(model, plain), expected)
