"""A cache of integers on an NPU: the values of the CPU's, read as integers, in recorded steps too."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from npu.marks import decoded
from npu.test_launches import llama
from support import families, numbers, tiny_models

import liteboost_adaptor
from liteboost_adaptor import native_npu
from liteboost_adaptor.bench.rounded_caches import rounding
from liteboost_adaptor.kv_cache import int8_layers
from liteboost_adaptor.kv_cache.int8_tensor import Int8KVTensor
from liteboost_adaptor.report import report

SAMPLE = ("llama", "qwen3", "gemma3_text", "gemma2")
ATTENTION = "FusedInferAttentionScore"


pytestmark = pytest.mark.usefixtures("no_grad", "undone")


def kept(cache: Any, beside: str = "") -> list[torch.Tensor]:
    """What the layers of a cache hold in memory: the integers, or the scales."""
    return [vars(layer)[beside + name] for layer in cache.layers for name in ("keys", "values")]


def reasons() -> set[str]:
    """Why rows or attention were not the operator's."""
    return {why for op, why, _ in native_npu.calls() if op in ("quantize_kv", "int8_attention") and why}


@pytest.mark.parametrize("family", SAMPLE)
def test_families_are_near_rounded_states(family: str) -> None:
    model = tiny_models.build(family, 0, tiny_models.sizes(family, 64, 4, 2)).bfloat16()
    inputs = families.inputs_of(model, 13, (0, 3, 6))
    exact_model = copy.deepcopy(model).float()
    with rounding():
        tokens, exact = families.decode(exact_model, inputs, 9)
        _, own = families.decode(model, inputs, 9, forced=tokens)
    liteboost_adaptor.apply(model.npu(), quant="kv8")
    there = {n: x.npu() if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}
    before = report.counter(int8_layers.RULE).calls
    _, found = families.decode(model, there, 9, forced=tokens.npu())
    assert report.counter(int8_layers.RULE).calls > before
    theirs = numbers.relative(own, exact)
    assert numbers.relative(found.cpu(), exact) <= max(1.5 * theirs, 2.0**-8)


def test_integers_and_scales_are_kept_apart_and_steps_are_captured() -> None:
    model = llama(2)
    ids = torch.randint(3, 1000, (1, 40)).npu()
    options = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True}
    options |= {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "eos_token_id": None}
    liteboost_adaptor.apply(model, quant="kv8")
    torch.ops.liteboost._npu_forget_counts()
    steps, graphs = report.counter("step.program"), report.counter("step.graph")
    before, replayed = steps.calls, graphs.calls
    first = model.generate(ids, **options)
    second = model.generate(ids, **options)
    assert torch.equal(first.sequences, second.sequences)
    assert steps.calls > before, dict(steps.fallbacks)
    # The second is captured as soon as its cache can grow; the first ran most of its steps otherwise.
    assert graphs.calls - replayed >= 36, dict(graphs.fallbacks)
    assert reasons() == {"more than 16 queries"}  # the prompt
    cache = second.past_key_values
    for integers, scales in zip(kept(cache), kept(cache, "_liteboost_scales_of_"), strict=True):
        assert integers.dtype == torch.int8 and integers.shape == (1, 2, 79, 64)
        assert scales.dtype == torch.float32 and scales.shape == (1, 2, 79, 1)
    layer = cache.layers[0]
    rows_of = int8_layers.kept(vars(layer), "keys")
    assert type(rows_of) is Int8KVTensor and rows_of.shape == (1, 2, 79, 64)
    values = rows_of.dequantized_kv()
    layer.crop(-29)  # as many are taken away
    rows_of = int8_layers.kept(vars(layer), "keys")
    assert rows_of.shape == (1, 2, 50, 64) and torch.equal(rows_of.dequantized_kv(), values[:, :, :50])
    moved = vars(copy.deepcopy(cache).layers[0])["keys"]
    assert torch.equal(moved.cpu().dequantized_kv(), values[:, :, :50].cpu())
    assert type(layer.keys) is torch.Tensor and torch.equal(layer.keys, values[:, :, :50])
    rows = [row for row in liteboost_adaptor.status().rules if row.id == int8_layers.RULE]
    assert any(row.state == "applied" for row in rows)


def test_a_cache_that_is_kept_holds_values_after_undo() -> None:
    model = llama(2)
    liteboost_adaptor.apply(model, quant="kv8")
    cache = model(torch.randint(3, 1000, (1, 20)).npu(), use_cache=True).past_key_values
    layer = cache.layers[0]
    expected = int8_layers.kept(vars(layer), "keys").dequantized_kv()
    liteboost_adaptor.undo()
    assert {*vars(layer)} >= {"keys", "values"} and not [name for name in vars(layer) if "liteboost" in name]
    assert type(layer.keys) is torch.Tensor and torch.equal(layer.keys, expected)


def test_beams_move_integers_and_scales() -> None:
    model = llama(2)
    ids = torch.randint(3, 1000, (2, 9)).npu()
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    options |= {"attention_mask": torch.ones_like(ids), "eos_token_id": None}
    liteboost_adaptor.apply(model, quant="kv8")
    torch.ops.liteboost._npu_forget_counts()
    read = dict(int8_layers.counter.fallbacks)
    model.generate(ids, **options)
    assert reasons() == set() and dict(int8_layers.counter.fallbacks) == read


def test_a_token_reads_about_half_of_the_bytes_of_the_cache() -> None:
    prompt = 252
    plain, ours = llama(2), llama(2)
    liteboost_adaptor.apply(plain, level=2)
    # Before, as often as it takes until steps are recorded.
    before = decoded(plain, prompt, 5, before=12)
    liteboost_adaptor.undo()
    liteboost_adaptor.apply(ours, quant="kv8")
    after = decoded(ours, prompt, 5, before=12)

    def read(trace: Any) -> list[int]:
        names = "key", "value", "key_scale", "value_scale"
        launches = [each for each in trace.launches if ATTENTION in each.op]
        return [sum(a.read for a in each.arguments if a.name in names) for each in launches]

    positions = prompt + 4
    assert read(before) == [positions * 2 * 2 * 64 * 2] * 2
    assert read(after) == [positions * 2 * 2 * (64 + 4)] * 2
    # For each layer two are rounded, and scales are written beside integers.
    assert len(after.launches) <= len(before.launches) + 2 * 5
    one_cache = prompt * 2 * 64
    for launch in after.launches:
        assert launch.written < one_cache / 4, launch
