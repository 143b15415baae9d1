"""Checkpoints and configurations that cannot be what they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from liteboost_adaptor.config import Quant, Settings, with_overrides
from liteboost_adaptor.errors import CheckpointError, ConfigError, QuantizationError
from liteboost_adaptor.quantization import LiteBoostConfig, offline

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "models" / "shakespeare-llama"
UP = "model.layers.0.mlp.up_proj"


def load(folder: Path, **arguments) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **arguments)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    load(FOLDER, quantization_config=LiteBoostConfig("w4a16")).save_pretrained(tmp_path)
    return tmp_path


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_newer_packing(saved: Path) -> None:
    change_config(saved, packing=2)
    with pytest.raises(QuantizationError, match=r"packing 2, and this liteboost_adaptor reads up to 1"):
        load(saved)


def test_a_field_nobody_knows(saved: Path) -> None:
    change_config(saved, rotation="hadamard")
    with pytest.raises(QuantizationError, match=r"has no rotation; known: scheme, .*newer liteboost_adaptor"):
        load(saved)


@pytest.mark.parametrize("part", ["weight", "scales"])
def test_a_part_that_is_missing(saved: Path, part: str) -> None:
    change_tensors(saved, lambda tensors: tensors.pop(f"{UP}.{part}"))
    with pytest.raises(
        QuantizationError, match=rf"what its quantization_config says:\n  {UP}.{part} is missing"
    ):
        load(saved)


def test_scales_of_another_group_size(saved: Path) -> None:
    change_tensors(saved, lambda t: t.update({f"{UP}.scales": torch.ones(704, 4, dtype=torch.bfloat16)}))
    with pytest.raises(QuantizationError, match=rf"{UP}.scales must be \[704, 8\] of .*found \[704, 4\]"):
        load(saved)


def test_a_weight_that_is_not_packed(saved: Path) -> None:
    change_tensors(saved, lambda t: t.update({f"{UP}.weight": torch.ones(704, 256, dtype=torch.uint8)}))
    with pytest.raises(QuantizationError, match=rf"{UP}.weight must be \[704, 128\] of .*found \[704, 256\]"):
        load(saved)


def test_scales_that_are_no_numbers(saved: Path) -> None:
    change_tensors(saved, lambda tensors: tensors[f"{UP}.scales"][3].fill_(float("nan")))
    with pytest.raises(QuantizationError, match=rf"{UP}.scales has values that are infinite or not a number"):
        load(saved)


def test_a_truncated_file(saved: Path) -> None:
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model.safetensors is cut short: .*Copy it again"):
        load(saved)


@pytest.mark.parametrize("name", [f"{UP}.weight", f"{UP}.scales", "model.norm.weight"])
@pytest.mark.parametrize("way", ["saved", "offline"])
def test_a_byte_that_has_changed_since(name: str, way: str, tmp_path: Path) -> None:
    from liteboost_adaptor.checkpoint.files import File

    config = LiteBoostConfig("w4a16")
    if way == "saved":
        load(FOLDER, quantization_config=config).save_pretrained(tmp_path / "new")
    else:
        offline.quantize_folder(FOLDER, tmp_path / "new", config)
    path = tmp_path / "new" / "model.safetensors"
    first = File(path).entries[name].first
    content = bytearray(path.read_bytes())
    content[first + 8] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=rf"{name} in .*model.safetensors is not what was written there"
    ):
        load(tmp_path / "new")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"scheme": "w3a16"}, "scheme must be one of"),
        ({"head": 4}, "head must be one of 8, 16, got 4"),
        ({"packing": 0}, "packing must be 1, got 0"),
        ({"group": 64}, "has no group; known: scheme, group_size"),
        ({"modules_to_not_convert": "lm_head"}, "must be a list of names, got 'lm_head'"),
    ],
)
def test_configurations_that_are_none(arguments: dict, text: str) -> None:
    with pytest.raises(QuantizationError, match=text):
        LiteBoostConfig(**arguments)


def test_the_variable_is_read() -> None:
    def read(text: str) -> Quant | None:
        return with_overrides(Settings(), quant=text).quant

    assert read("0") is None
    assert read("w8a16") == Quant("w8a16") == read("w8a16 , head=8")
    assert read("w4a16,group=128,asymmetric,head=16") == Quant("w4a16", 128, False, 16)
    assert with_overrides(Settings(), quant=Quant("w4a16", 64, False)).quant == Quant("w4a16", 64, False)
    for wrong in (
        "w4",
        "w8a16,group=32",
        "w4a16,group=16",
        "w4a16,head=4",
        "w4a16,sym",
        "w8a16,head=8,head=8",
    ):
        with pytest.raises(ConfigError, match="quant must be 0"):
            read(wrong)
