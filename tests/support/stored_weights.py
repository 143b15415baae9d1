"""Checkpoints as GPTQ, AWQ and compressed-tensors publish their layouts, written with numpy."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from . import tiny_models

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Weight:
    """``scale * (integer - zero)``: integers ``[out, in]``, the others ``[out, groups]``."""

    integers: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    groups: np.ndarray
    bits: int

    def exact(self) -> torch.Tensor:
        """In float64."""
        zeros, scales = self.zeros[:, self.groups], self.scales[:, self.groups]
        return torch.from_numpy(scales.astype(np.float64) * (self.integers - zeros))


def random(
    shape: tuple[int, int],
    seed: int,
    bits: int = 4,
    size: int = 32,
    symmetric: bool = True,
    act: bool = False,
) -> Weight:
    """A weight of ``shape`` in groups of ``size`` (0: one), scattered ones with ``act``."""
    rng = np.random.default_rng(seed)
    outputs, inputs = shape
    size = size or inputs
    groups = np.arange(inputs) // size
    if act:
        groups = rng.permutation(groups)
    count = int(groups.max()) + 1
    top = 1 << bits
    integers = rng.integers(0, top, shape)
    zeros = np.full((outputs, count), top // 2) if symmetric else rng.integers(1, top, (outputs, count))
    scales = (rng.uniform(0.5, 1.5, (outputs, count)) * 0.3 / top).astype(np.float16)
    return Weight(integers, zeros, scales, groups, bits)


def words(values: np.ndarray, bits: int) -> np.ndarray:
    """Rows of integers as a stream of bits, lowest first, in int32."""
    one_by_one = (values[..., None] >> np.arange(bits)) & 1
    stream = one_by_one.reshape(len(values), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    octets = np.packbits(stream.astype(np.uint8), axis=1, bitorder="little")
    return octets.view("<u4").view("<i4")


def tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def gptq(weight: Weight, v2: bool = False) -> dict[str, torch.Tensor]:
    stored = weight.zeros if v2 else (weight.zeros - 1) & ((1 << weight.bits) - 1)
    return {
        "qweight": tensor(words(weight.integers, weight.bits).T),
        "qzeros": tensor(words(stored.T, weight.bits)),
        "scales": tensor(weight.scales.T),
        "g_idx": tensor(weight.groups.astype(np.int32)),
    }


def awq(weight: Weight) -> dict[str, torch.Tensor]:
    def packed(values: np.ndarray) -> torch.Tensor:
        eights = values.reshape(len(values), -1, 8)[..., AWQ_ORDER]
        return tensor(words(eights.reshape(len(values), -1), 4))

    return {
        "qweight": packed(weight.integers.T),
        "qzeros": packed(weight.zeros.T),
        "scales": tensor(weight.scales.T),
    }


def pack_quantized(weight: Weight, symmetric: bool) -> dict[str, torch.Tensor]:
    found = {
        "weight_packed": tensor(words(weight.integers, weight.bits)),
        "weight_scale": tensor(weight.scales),
        "weight_shape": torch.tensor(weight.integers.shape),
    }
    if not symmetric:
        found["weight_zero_point"] = tensor(words(weight.zeros.T, weight.bits).T)
    if (np.diff(weight.groups) < 0).any():
        found["weight_g_idx"] = tensor(weight.groups.astype(np.int32))
    return found


def int_quantized(weight: Weight, symmetric: bool) -> dict[str, torch.Tensor]:
    half = 1 << (weight.bits - 1)
    found = {
        "weight": tensor((weight.integers - half).astype(np.int8)),
        "weight_scale": tensor(weight.scales),
    }
    if not symmetric:
        found["weight_zero_point"] = tensor((weight.zeros - half).astype(np.int8))
    return found


def compressed_config(form: str, bits: int, size: int, symmetric: bool, **more: Any) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if size else "channel",
        "group_size": size or None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, **more}},
        "ignore": ["lm_head"],
    }


def write(
    folder: Path,
    model: torch.nn.Module,
    config: dict[str, Any],
    make: Callable[[tuple[int, int], int], Weight],
    pack: Callable[[Weight], dict[str, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """Write ``model`` with every linear layer but the head in a format; returns the weights in float64."""
    model.half().save_pretrained(folder)
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    exact = {}
    for seed, (name, layer) in enumerate(model.named_modules()):
        if not isinstance(layer, torch.nn.Linear) or name == "lm_head":
            continue
        weight = make((layer.out_features, layer.in_features), seed)
        exact[name] = weight.exact()
        del tensors[f"{name}.weight"]
        tensors.update((f"{name}.{part}", value) for part, value in pack(weight).items())
    save(folder, tensors, config)
    return exact


def save(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Put ``tensors`` in the place of those in ``folder``, and say how they are meant."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))


def write_mxfp4(folder: Path) -> None:
    """GPT-OSS as it is published: experts of 4 bits, 32 of which have a power of two in common."""
    model = tiny_models.build("gpt_oss")
    model.config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    state, generator = {}, torch.Generator().manual_seed(0)
    for name, value in model.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            state[name] = value
            continue
        experts, inputs, outputs = value.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator)
        scales = torch.randint(119, 123, (experts, outputs, inputs // 32), generator=generator)
        state |= {f"{name}_blocks": blocks.to(torch.uint8), f"{name}_scales": scales.to(torch.uint8)}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
