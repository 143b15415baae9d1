"""Activations and gated products of single families: on our op, and nothing left on the original."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support import calls, numbers, tiny_models

import liteboost_adaptor

#: Family -> rules that must serve it.
FAMILIES = {
    "bitnet": {"mlp.relu2"},
    "lfm2": {"mlp.silu_function"},
    "recurrent_gemma": {"mlp.gelu_tanh"},
    "qwen3_5_text": {"mlp.silu", "mlp.sigmoid_function"},
    "gpt2": {"mlp.gelu_tanh_module"},
    "nemotron": {"mlp.relu2_module"},
    "gemma3n_text": {"mlp.gelu_tanh"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_family_is_served(family: str, dtype: torch.dtype) -> None:
    model = numbers.cast(tiny_models.build(family), dtype)
    inputs = numbers.padded_inputs(model)
    with torch.no_grad():
        reference = numbers.exact(model, family, inputs)
        kept = inputs["attention_mask"].bool()
        exact, original = reference.logits[kept], model(**inputs).logits[kept].double()
        liteboost_adaptor.apply(model, disable="rope.*,norm.*,attention.*,experts.*")
        with calls.served() as served:
            found = model(**inputs).logits[kept].double()
    assert FAMILIES[family] <= served.rules.keys()
    assert not [why for rule, why in served.fallbacks if rule in FAMILIES[family]]
    if dtype == torch.float32:
        assert numbers.relative(found, original) <= 2e-5
    else:
        own = (original - exact).norm()
        assert (found - exact).norm() <= max(1.5 * own, numbers.ULP[dtype] * exact.norm())


def test_an_activation_function_exchanged_afterwards_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.build("lfm2")
    inputs = tiny_models.example_inputs(model)
    liteboost_adaptor.apply(model)
    monkeypatch.setattr(F, "silu", lambda x: x * 0)
    with torch.no_grad(), calls.served() as served:
        found = model(**inputs).logits
    assert ("mlp.silu_function", "the activation was exchanged") in served.fallbacks
    liteboost_adaptor.undo()
    with torch.no_grad():
        assert numbers.relative(found, model(**inputs).logits) <= 2e-5


def test_gradients_pass_through_the_original() -> None:
    model = tiny_models.build("lfm2")
    inputs = tiny_models.example_inputs(model)
    model(**inputs).logits.sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    liteboost_adaptor.apply(model)
    with calls.served() as served:
        model(**inputs).logits.sum().backward()
    assert ("mlp.silu_function", "grad mode") in served.fallbacks
    for name, p in model.named_parameters():
        assert (p.grad is None) == (name not in expected)
        assert p.grad is None or torch.equal(p.grad, expected[name]), name
