"""Where weights lie and what they are made of: dtypes, offloading to CPU and disk, dynamic quantization."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from support import calls, numbers, tiny_models
from support.ways import FAMILIES, compare, families
from torch import nn

import liteboost_adaptor

#: What a parent would do in the place of a child stays with the child, whose hook brings the weights.
OFFLOADED = {"the instance has a forward of its own", "a weight on another device (offloaded)"}


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(**numbers.padded_inputs(model)).logits


def real(model: nn.Module, found: torch.Tensor) -> torch.Tensor:
    return found[numbers.padded_inputs(model)["attention_mask"].bool()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@families("llama", "gpt2", "gemma2", "gpt_neox", "phi3", "qwen3", "cohere", "olmo2")
def test_half_and_to_while_served(family: str, dtype: torch.dtype, level: int) -> None:
    """There and back: in 16 bits as near to float64 as the original is."""
    reference, model = tiny_models.build(family), tiny_models.build(family)
    liteboost_adaptor.apply(model, level=level)
    logits(model)
    for each in (reference, model):
        each.half() if dtype == torch.float16 else each.to(dtype)
    exact = real(reference, numbers.exact(reference, family, numbers.padded_inputs(reference)).logits)
    own = (real(reference, logits(reference)).double() - exact).norm()
    with calls.served() as served:
        found = logits(model)
    assert found.dtype == dtype and served.kinds["norm"] > 0 and served.kinds["attention"] > 0
    ours = (real(model, found).double() - exact).norm()
    assert ours <= max(1.5 * own, numbers.ULP[dtype] * exact.norm())
    for each in (reference, model):
        each.float()
    assert numbers.relative(real(model, logits(model)), real(model, logits(reference))) <= 2e-5
    liteboost_adaptor.undo(model)
    assert torch.equal(logits(model), logits(reference))


def test_double_runs_the_original_and_says_so(level: int) -> None:
    model = tiny_models.build("llama").to(torch.float64)
    runs = compare(model, level, lambda: logits(model))
    assert torch.equal(runs.found, runs.expected)
    assert runs.reasons == {"dtype float64"}


def handed_back(served: calls.Served) -> bool:
    reasons = {why for _, why in served.fallbacks}
    return bool(reasons) and reasons <= OFFLOADED


def split(model: nn.Module, offloaded: str) -> dict[str, Any]:
    """A device map with the last decoder layer and the final norm on ``offloaded``, the rest on CPU."""
    inner = model.base_model_prefix
    layers = next(name for name, part in model.named_modules() if isinstance(part, nn.ModuleList))
    count = len(model.get_submodule(layers))
    device_map: dict[str, Any] = {}
    for name, _ in model.named_children():
        if name != inner:
            device_map[name] = "cpu"
    for name, _ in getattr(model, inner).named_children():
        path = f"{inner}.{name}"
        if path == layers:
            device_map |= {f"{layers}.{n}": offloaded if n == count - 1 else "cpu" for n in range(count)}
        else:
            device_map[path] = offloaded if "norm" in name or name == "ln_f" else "cpu"
    return device_map


@pytest.mark.parametrize("order", ["offloaded before us", "offloaded after us"])
@families(*FAMILIES)
def test_weights_offloaded_to_disk(family: str, order: str, level: int, tmp_path: Path) -> None:
    model = tiny_models.build(family)
    expected = logits(model)
    if order == "offloaded after us":
        liteboost_adaptor.apply(model, level=level)
    device_map = split(model, "disk")
    dispatched = accelerate.dispatch_model(
        model, device_map, main_device="cpu", offload_dir=tmp_path, force_hooks=True
    )
    if order == "offloaded before us":
        liteboost_adaptor.apply(model, level=level)
    assert any(parameter.is_meta for parameter in model.parameters()), "nothing is offloaded"
    with calls.served() as served:
        found = logits(dispatched)
    assert numbers.relative(found, expected) <= 2e-5
    assert served.kinds["norm"] > 0 and handed_back(served)
    liteboost_adaptor.undo(model)
    assert torch.equal(logits(dispatched), expected)


@families(*FAMILIES)
def test_weights_offloaded_to_cpu(family: str, level: int) -> None:
    """Every weight is on meta outside the forward of its module."""
    model = tiny_models.build(family)
    expected = logits(model)
    accelerate.cpu_offload(model, torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())
    liteboost_adaptor.apply(model, level=level)
    with calls.served() as served:
        found = logits(model)
    assert numbers.relative(found, expected) <= 2e-5
    assert served.kinds["norm"] > 0 and handed_back(served)
    liteboost_adaptor.undo(model)
    assert torch.equal(logits(model), expected)


@families(*FAMILIES)
def test_device_map_auto(family: str, level: int, tmp_path: Path) -> None:
    """Loaded with ``device_map="auto"`` and too little memory for it all: the rest goes to disk."""
    original = tiny_models.build(family)
    expected = logits(original)
    original.save_pretrained(tmp_path / "checkpoint", max_shard_size="100KB")
    size = sum(parameter.numel() * 4 for parameter in original.parameters())
    liteboost_adaptor.apply(level=level)
    model = type(original).from_pretrained(
        tmp_path / "checkpoint",
        device_map="auto",
        max_memory={"cpu": int(size * 0.7)},
        offload_folder=tmp_path / "offload",
    )
    assert "disk" in model.hf_device_map.values()
    with calls.served() as served:
        found = logits(model)
    assert numbers.relative(found, expected) <= 2e-5
    assert served.kinds["norm"] > 0 and handed_back(served)
    liteboost_adaptor.undo()
    with calls.served() as served:
        assert numbers.relative(logits(model), expected) <= 2e-6  # other memory, other alignment
    assert served.rules == {}


def test_removing_the_hooks_leaves_a_served_model(level: int) -> None:
    model = tiny_models.build("llama")
    expected = logits(model)
    accelerate.cpu_offload(model, torch.device("cpu"))
    liteboost_adaptor.apply(model, level=level)
    logits(model)
    accelerate.hooks.remove_hook_from_submodules(model)
    with calls.served() as served:
        assert numbers.relative(logits(model), expected) <= 2e-5
    # accelerate leaves the bound method it had found on the instance.
    assert served.kinds["norm"] > 0
    liteboost_adaptor.undo(model)
    with calls.served() as served:
        assert torch.equal(logits(model), expected)
    assert served.rules == {}


def test_a_forward_that_hides_the_class_is_left_alone(level: int) -> None:
    """A closure holds the original where nobody can see it: theirs runs, and the status says so."""
    model = tiny_models.build("llama")
    expected = logits(model)
    seen: list[int] = []
    for layer in model.model.layers:
        original = layer.mlp.forward
        layer.mlp.forward = lambda x, original=original: (seen.append(1), original(x))[1]
    liteboost_adaptor.apply(model, level=level)
    assert numbers.relative(logits(model), expected) <= 2e-5
    assert len(seen) == len(model.model.layers)
    foreign = [row for row in liteboost_adaptor.status().rules if row.state == "foreign"]
    assert any("LlamaMLP" in target for row in foreign for target in row.where)


@pytest.mark.parametrize("order", ["before us", "after us"])
@families("llama", "gemma2", "mixtral", "gpt_neox", "phi3", "qwen3", "gpt_oss")
def test_quantize_dynamic(family: str, order: str, level: int) -> None:
    """Layers become int8 modules: those are called as they are, and everything beside them is served."""

    def quantized(model: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8, inplace=True)

    reference, model = quantized(tiny_models.build(family)), tiny_models.build(family)
    expected = logits(reference)
    if order == "after us":
        liteboost_adaptor.apply(model, level=level)
        logits(model)
    model = quantized(model)
    if order == "before us":
        liteboost_adaptor.apply(model, level=level)
    with calls.served() as served:
        found = logits(model)
    # A rounding difference before an int8 layer may cross the border between two codes, at some position.
    found, expected_there = real(model, found), real(model, expected)
    distance = (found - expected_there).abs().amax(-1) / expected_there.abs().max()
    assert (distance <= 2e-5).float().mean() > 0.5 and distance.max() <= 2e-2
    assert served.kinds["norm"] > 0 and served.kinds["linear"] == 0
    liteboost_adaptor.undo(model)
    assert torch.equal(logits(model), expected)
