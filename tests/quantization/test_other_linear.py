"""Linear layers that are no ``nn.Linear``: ``Conv1D``, whose weight is transposed, and Falcon's own class."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from support import families, numbers, tiny_models
from transformers.pytorch_utils import Conv1D

import liteboost_adaptor
from liteboost_adaptor.quantization import LiteBoostConfig, QuantizedLinear, offline, quantize_model


def load(folder: Path, **arguments) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **arguments).eval()


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16", "w8a8", "w4a8"])
@pytest.mark.parametrize("family", ["gpt2", "falcon"])
def test_loaded_saved_and_offline_they_are_the_same(family: str, scheme: str, tmp_path: Path) -> None:
    tiny_models.build(family).bfloat16().save_pretrained(tmp_path / "plain")
    loaded = load(tmp_path / "plain", quantization_config=LiteBoostConfig(scheme))
    kinds = {type(layer).__name__ for layer in loaded.modules()}
    assert "QuantizedLinear" in kinds and not {"Conv1D", "FalconLinear"} & kinds
    loaded.save_pretrained(tmp_path / "saved")
    offline.quantize_folder(tmp_path / "plain", tmp_path / "offline", LiteBoostConfig(scheme))
    others = [quantize_model(load(tmp_path / "plain"), LiteBoostConfig(scheme))]
    others += [load(tmp_path / name) for name in ("saved", "offline")]
    state = loaded.state_dict()
    for other in others:
        found = other.state_dict()
        assert found.keys() == state.keys()
        assert all(torch.equal(tensor, found[name]) for name, tensor in state.items())


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16"])
@pytest.mark.parametrize("family", ["gpt2", "falcon"])
def test_logits_are_those_of_the_weights_dequantized(family: str, scheme: str) -> None:
    model = tiny_models.build(family)
    inputs = families.inputs_of(model, 13, (0, 3, 6))
    quantize_model(model, LiteBoostConfig(scheme))
    twin = copy.deepcopy(model).dequantize(dtype=torch.float32)
    liteboost_adaptor.undo(twin)
    tokens, expected = families.decode(twin, inputs, 3)
    liteboost_adaptor.apply(model)
    _, found = families.decode(model, inputs, 3, forced=tokens)
    assert numbers.relative(found, expected) <= 2e-5


def test_dequantized_a_transposed_layer_is_one_again() -> None:
    model = tiny_models.build("gpt2")
    before = model.transformer.h[0].attn.c_attn.weight.detach().clone()
    quantize_model(model, LiteBoostConfig("w8a16"))
    layer = model.transformer.h[0].attn.c_attn
    assert isinstance(layer, QuantizedLinear) and layer.weight.shape[0] == before.shape[1] // 16
    model.dequantize(dtype=torch.float32)
    again = model.transformer.h[0].attn.c_attn
    assert isinstance(again, Conv1D) and again.weight.shape == before.shape
    assert numbers.relative(again.weight.detach(), before) <= 0.01
