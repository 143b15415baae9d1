"""Tensors of a checkpoint of which transformers splits several layers (since 5.24), with integers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from support import tiny_models
from transformers import AutoModelForCausalLM

from liteboost_adaptor.quantization import LiteBoostConfig, quantize_model

core_model_loading = pytest.importorskip("transformers.core_model_loading")
pytestmark = pytest.mark.skipif(
    not hasattr(core_model_loading, "Split"), reason="this transformers splits no tensors"
)
#: Query, key and value of three lengths; what a linear attention is given, of which some layers are tiny.
FAMILIES = {"sarvam_moe": "query_key_value.weight", "lara_mini": "linear_attn.in_proj.weight"}


def names_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.parametrize(
    "config",
    [LiteBoostConfig("w8a16"), LiteBoostConfig("w4a16", symmetric=False), LiteBoostConfig("w8a8")],
    ids=lambda config: config.scheme,
)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_layers_are_rounded_as_they_are_split_and_saved_each_by_itself(
    tmp_path: Path, family: str, config: LiteBoostConfig
) -> None:
    model = tiny_models.build(family)
    inputs = tiny_models.example_inputs(model, batch=2, padding=3)
    model.save_pretrained(tmp_path / "plain")
    assert any(name.endswith(FAMILIES[family]) for name in names_in(tmp_path / "plain"))
    quantize_model(model, config)
    expected = model(**inputs).logits
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)
    assert torch.equal(loaded(**inputs).logits, expected)
    for way, each in (("applied", model), ("loaded", loaded)):
        each.save_pretrained(tmp_path / way)
        assert not any(FAMILIES[family] in name for name in names_in(tmp_path / way))
        again = AutoModelForCausalLM.from_pretrained(tmp_path / way)
        assert torch.equal(again(**inputs).logits, expected)


@torch.no_grad()
def test_a_layer_that_is_left_out_is_saved_beside_those_of_integers(tmp_path: Path) -> None:
    model = tiny_models.build("sarvam_moe")
    inputs = tiny_models.example_inputs(model)
    quantize_model(model, LiteBoostConfig("w8a16", modules_to_not_convert=["k_proj"]))
    assert type(model.model.layers[0].self_attn.k_proj) is torch.nn.Linear
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)


@torch.no_grad()
def test_what_is_dequantized_is_saved_as_it_came(tmp_path: Path) -> None:
    model = tiny_models.build("sarvam_moe")
    model.save_pretrained(tmp_path / "plain")
    config = LiteBoostConfig("w8a16")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)
    loaded.dequantize().save_pretrained(tmp_path / "again")
    assert names_in(tmp_path / "again") == names_in(tmp_path / "plain")
