"""Every causal-LM family of the installed transformers, whether or not a rule is meant for it."""

from __future__ import annotations

import pytest
import torch
from support import numbers, state, tiny_models

import liteboost_adaptor


@pytest.mark.parametrize("family", tiny_models.families())
def test_served_or_not_the_numbers_are_the_originals(family: str) -> None:
    try:
        model = tiny_models.build(family)
        inputs = tiny_models.example_inputs(model, padding=3)
        with torch.no_grad():
            expected = model(**inputs).logits
            again = model(**inputs).logits
    except (ImportError, ValueError) as fault:
        pytest.skip(f"transformers cannot run a tiny {family} here: {fault}")
    liteboost_adaptor.apply(model)
    with torch.no_grad():
        found = model(**inputs).logits
    rows = state.rows()
    assert "failed" not in rows, [row.reason for row in rows["failed"]]
    assert numbers.relative(found, expected) <= 2e-5
    liteboost_adaptor.undo()
    assert not any("__liteboost__" in vars(type(part)) for part in model.modules())
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, again)
