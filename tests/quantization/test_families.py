"""Families with quantized weights, beside transformers' own code on the same weights dequantized."""

from __future__ import annotations

import copy

import pytest
import torch
from support import families, numbers, tiny_models

import liteboost_adaptor
from liteboost_adaptor.quantization import LiteBoostConfig, QuantizedLinear, quantize_model

SAMPLE = (
    *("llama", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "gpt_oss", "gpt_neox", "qwen3_moe"),
    *("mixtral", "deepseek_v3"),
    "mamba2",  # its code reads the head's dtype
)
SCHEMES = ("w8a16", "w4a16")
TOLERANCE = 2e-5


def check(family: str, scheme: str) -> None:
    """A left-padded batch and cached steps, at level 2, within rounding of the weights dequantized."""
    model = tiny_models.build(family)
    inputs = families.inputs_of(model, 13, (0, 3, 6))
    liteboost_adaptor.undo(model)
    quantize_model(model, LiteBoostConfig(scheme))
    assert any(isinstance(layer, QuantizedLinear) for layer in model.modules())
    twin = copy.deepcopy(model).dequantize(dtype=torch.float32)
    liteboost_adaptor.undo(twin)
    tokens, expected = families.decode(twin, inputs, 3)
    liteboost_adaptor.apply(model)
    _, found = families.decode(model, inputs, 3, forced=tokens)
    assert numbers.relative(found, expected) <= TOLERANCE


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", SAMPLE)
def test_logits_are_those_of_the_weights_dequantized(family: str, scheme: str) -> None:
    check(family, scheme)


@pytest.mark.full
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", sorted(set(families.buildable()) - set(SAMPLE)))
def test_logits_of_every_other_family(family: str, scheme: str) -> None:
    check(family, scheme)


def test_a_layer_whose_weight_is_read_by_other_code_stays() -> None:
    model = quantize_model(tiny_models.build("mamba2"), LiteBoostConfig("w8a16"))
    assert type(model.lm_head).__name__ == "Linear"
    rows = [row for row in liteboost_adaptor.status().rules if row.id == "quantization"]
    assert any("the model's code reads its weight" in row.reason and "lm_head" in row.where for row in rows)
