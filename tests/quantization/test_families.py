"""Families with quantised weights, beside transformers' own code on the same weights multiplied out."""

from __future__ import annotations

import copy

import pytest
import torch
from support import numbers, tiny_models

import liteboost_adaptor
from liteboost_adaptor.quantization import LiteBoostConfig, QuantizedLinear, quantize_model

SAMPLE = ("llama", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "gpt_oss", "gpt_neox", "qwen3_moe")
SCHEMES = ("w8a16", "w4a16")
TOLERANCE = 2e-5


@torch.no_grad()
def logits(model: torch.nn.Module, inputs: dict) -> torch.Tensor:
    found = model(**inputs).logits
    return found[inputs["attention_mask"].bool()]


def check(family: str, scheme: str) -> None:
    """A prompt with padding, at level 2, within rounding of the weights multiplied out."""
    model = tiny_models.build(family)
    inputs = numbers.padded_inputs(model)
    liteboost_adaptor.undo(model)
    quantize_model(model, LiteBoostConfig(scheme))
    assert any(isinstance(layer, QuantizedLinear) for layer in model.modules())
    twin = copy.deepcopy(model).dequantize(dtype=torch.float32)
    liteboost_adaptor.undo(twin)
    expected = logits(twin, inputs)
    liteboost_adaptor.apply(model)
    assert numbers.relative(logits(model, inputs), expected) <= TOLERANCE


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", SAMPLE)
def test_logits_are_those_of_the_weights_multiplied_out(family: str, scheme: str) -> None:
    check(family, scheme)
