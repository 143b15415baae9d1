"""LoRA of PEFT over quantized layers."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from support import tiny_models

import liteboost_adaptor
from liteboost_adaptor.errors import QuantizationError
from liteboost_adaptor.quantization import LiteBoostConfig, QuantizedLinear, quantize_model

peft = pytest.importorskip("peft")

IDS = torch.arange(3, 15)[None]
TARGETS = ["q_proj", "v_proj", "down_proj"]


def quantized(scheme: str = "w4a16") -> torch.nn.Module:
    return quantize_model(tiny_models.build("llama"), LiteBoostConfig(scheme))


def adapted(model: torch.nn.Module, **arguments) -> torch.nn.Module:
    config = peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False, **arguments)
    torch.manual_seed(1)
    return peft.get_peft_model(model, config).eval()


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16"])
def test_an_adapter_adds_to_the_weights_dequantized(scheme: str) -> None:
    model = quantized(scheme)
    plain = copy.deepcopy(model).dequantize(dtype=torch.float32)
    with torch.no_grad():
        base = model(input_ids=IDS).logits
    ours, theirs = adapted(model), adapted(plain)
    liteboost_adaptor.undo(theirs)
    with torch.no_grad():
        found, expected = ours(input_ids=IDS).logits, theirs(input_ids=IDS).logits
        assert (found - expected).norm() <= 2e-5 * expected.norm()
        assert (found - base).norm() > 1e-2 * base.norm()
        with ours.disable_adapter():
            assert torch.equal(ours(input_ids=IDS).logits, base)


def test_an_adapter_is_trained_and_the_integers_are_not(tmp_path: Path) -> None:
    model = adapted(quantized())
    before = {name: tensor.clone() for name, tensor in model.named_buffers()}
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(input_ids=IDS, labels=IDS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_buffers())
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(quantized(), tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(input_ids=IDS).logits, model.eval()(input_ids=IDS).logits)
    layer = again.base_model.model.model.layers[0].self_attn.q_proj
    assert isinstance(layer.get_base_layer(), QuantizedLinear)


def test_what_needs_the_weight_is_refused() -> None:
    with pytest.raises(QuantizationError, match="cannot be merged into weights of 8 or 4 bits"):
        adapted(quantized()).merge_and_unload()
    with pytest.raises(QuantizationError, match="DoRA needs the weight in floating point"):
        adapted(quantized(), use_dora=True)


def test_undo_leaves_peft_as_it_was() -> None:
    liteboost_adaptor.undo()
    try:
        with pytest.raises(ValueError, match="not supported"):
            adapted(quantized())
    finally:
        liteboost_adaptor.apply()
    adapted(quantized())
