"""What a configuration of another format says of tensors, and what real checkpoints say that is unusual."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import numbers, stored_weights
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from liteboost_adaptor.errors import CheckpointError, QuantizationError
from liteboost_adaptor.quantization import LiteBoostConfig, QuantizedLinear, quantize_model
from liteboost_adaptor.quantization.formats.compressed_tensors import config_groups, group_of

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 40,
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
UP = "model.layers.0.mlp.up_proj"
IDS = torch.tensor([[3, 9, 27]])


def write(folder: Path, config: dict[str, Any], tied: bool = False, change: Any = None, **form: Any) -> dict:
    """A GPTQ checkpoint; returns the weights it means."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))

    def make(shape: tuple[int, int], seed: int) -> stored_weights.Weight:
        weight = stored_weights.random(shape, seed, size=32, **form)
        if change is not None:
            change(weight)
        return weight

    exact = stored_weights.write(folder, model, config, make, stored_weights.gptq)
    if tied:
        tensors = load_file(folder / "model.safetensors")
        tensors.pop("lm_head.weight")
        stored_weights.save(folder, tensors, config)
    return exact


def load(folder: Path, cls: Any = AutoModelForCausalLM, **arguments: Any) -> torch.nn.Module:
    return cls.from_pretrained(folder, dtype=torch.float32, **arguments).eval()


def assert_exact(model: torch.nn.Module, exact: dict[str, torch.Tensor]) -> None:
    for name, weight in exact.items():
        assert torch.equal(model.get_submodule(name).dequantize(torch.float64), weight), name


def negate(weight: stored_weights.Weight) -> None:
    weight.scales[::2] *= -1


@pytest.mark.parametrize(
    "says",
    [
        {"autoround_version": "0.5.1"},
        {"provider": "auto-round"},
        {"meta": {"quantizer": ["gptqmodel:1.4.0", "intel/auto-round:0.3.1"]}},
    ],
    ids=str,
)
def test_autoround_gives_symmetric_scales_a_sign(says: dict[str, Any], tmp_path: Path) -> None:
    exact = write(tmp_path, GPTQ | says, change=negate)
    assert_exact(load(tmp_path), exact)


@pytest.mark.parametrize(("says", "symmetric"), [({}, True), ({"provider": "auto-round"}, False)])
def test_nobody_else_does(says: dict[str, Any], symmetric: bool, tmp_path: Path) -> None:
    write(tmp_path, GPTQ | says | {"sym": symmetric}, change=negate, symmetric=symmetric)
    with pytest.raises(QuantizationError, match=r"scales with \d+ negative values, .*model\.safetensors"):
        load(tmp_path)


def test_a_group_of_zeros_may_have_lost_its_scale(tmp_path: Path) -> None:
    def dead(weight: stored_weights.Weight) -> None:
        weight.scales[3, 1] = 0
        weight.integers[3, 32:64] = 8

    exact = write(tmp_path / "zeros", GPTQ, change=dead)
    assert_exact(load(tmp_path / "zeros"), exact)
    write(tmp_path / "lost", GPTQ, change=lambda weight: weight.scales.__setitem__((3, 1), np.float16(0)))
    with pytest.raises(QuantizationError, match=r"scales that are zero for 1 groups of integers that differ"):
        load(tmp_path / "lost")


def test_exceptions_by_layer(tmp_path: Path) -> None:
    """GPTQModel's ``dynamic``: here, layers that are left alone, and groups of another size."""
    changes = {r"-:.*lm_head.*": {}, r"+:.*\.up_proj.*": {"group_size": 32}, r".*\.nothing": {"bits": 8}}
    exact = write(tmp_path, GPTQ | {"dynamic": changes})
    assert_exact(load(tmp_path), exact)
    write(tmp_path, GPTQ | {"dynamic": {r".*\.up_proj": {"bits": 8}}})
    with pytest.raises(QuantizationError, match=r"up_proj of the checkpoint has qweight .* says bits = 8"):
        load(tmp_path)
    write(tmp_path, GPTQ | {"dynamic": {"(": {"bits": 8}}})
    with pytest.raises(QuantizationError, match="no regular expression"):
        load(tmp_path)


def test_another_task_and_the_base_alone(tmp_path: Path) -> None:
    write(tmp_path / "theirs", GPTQ)
    torch.manual_seed(0)
    quantize_model(LlamaForCausalLM(LlamaConfig(**SIZES)), LiteBoostConfig("w8a16")).save_pretrained(
        tmp_path / "ours"
    )
    classes = (("theirs", AutoModel), ("theirs", AutoModelForSequenceClassification), ("ours", AutoModel))
    for name, cls in classes:
        made = load(tmp_path / name, cls)
        assert sum(isinstance(each, QuantizedLinear) for each in made.modules()) == 7


def test_a_tied_head_is_not_missing(tmp_path: Path) -> None:
    exact = write(tmp_path, GPTQ, tied=True)
    model = load(tmp_path)
    assert_exact(model, exact)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"])
def test_parameters_that_are_missing(name: str, tmp_path: Path) -> None:
    write(tmp_path, GPTQ)
    tensors = load_file(tmp_path / "model.safetensors")
    stored_weights.save(tmp_path, {key: value for key, value in tensors.items() if key != name}, GPTQ)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors has no {name}, .*at random"):
        load(tmp_path)


def test_files_of_ours_without_checksums(tmp_path: Path) -> None:
    model = quantize_model(LlamaForCausalLM(LlamaConfig(**SIZES)), LiteBoostConfig("w4a16"))
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path), path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.safetensors has no checksums .*\"checksums\": false"):
        load(tmp_path)
    config = tmp_path / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"quantization_config": {', '"quantization_config": {"checksums": false,'))
    again = load(tmp_path)
    with torch.no_grad():
        assert numbers.relative(again(input_ids=IDS).logits, model(input_ids=IDS).logits) <= 1e-6
    again.save_pretrained(tmp_path / "again")
    assert "checksums" not in (tmp_path / "again" / "config.json").read_text()
    load(tmp_path / "again")


def test_a_configuration_that_is_another_than_was_written(tmp_path: Path) -> None:
    model = quantize_model(LlamaForCausalLM(LlamaConfig(**SIZES)), LiteBoostConfig("w8a16"))
    model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"w8a16"', '"w8a8"'))
    with pytest.raises(CheckpointError, match=r"quantization_config in config\.json beside .*not the one"):
        load(tmp_path)


def test_groups_of_compressed_tensors_are_found_by_name_and_by_class() -> None:
    def group(*targets: str, bits: int) -> dict[str, Any]:
        return {"targets": list(targets), "weights": {"num_bits": bits, "strategy": "channel"}}

    said = {
        "a": group("Linear", bits=4),
        "b": group(r"re:.*down_proj$", bits=8),
        "c": group("lm_head", bits=2),
    }
    groups = config_groups({"config_groups": said})
    names = (UP, "model.layers.0.mlp.down_proj", "lm_head")
    assert [group_of(groups, (name,)).config.bits for name in names] == [4, 8, 2]
    assert group_of(groups[1:], (UP,)) is None
    assert group_of(groups[1:2], (UP,)).config.bits == 8  # nothing else can be meant


def test_weights_that_stay_need_no_checksums(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    said = LiteBoostConfig("kv8").to_dict()
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": said}))
    assert load(tmp_path).config.quantization_config.kv_cache == "int8"


def test_scales_that_two_halves_cannot_keep(tmp_path: Path) -> None:
    def large(weight: stored_weights.Weight) -> None:
        weight.scales[:] = 6e4

    write(tmp_path, GPTQ | {"bits": 8, "sym": False}, change=large, bits=8, symmetric=False)
    with pytest.raises(QuantizationError, match=r"proj of the checkpoint has scales of 8 bits that are too"):
        load(tmp_path)
