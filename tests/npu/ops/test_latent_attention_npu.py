"""Attention to the compressed cache of MLA on an NPU: the op by itself, and in models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cann_sim.trace import recording
from npu.test_launches import deepseek
from support import calls
from torch import Tensor

import liteboost_adaptor
from liteboost_adaptor import native_npu
from liteboost_adaptor.ops.latent_attention import latent_attention as reference

OP = "_npu_latent_attention"


def arguments(
    dtype: torch.dtype, batch: int = 2, heads: int = 4, keys: int = 9, sizes: tuple[int, int] = (512, 64)
) -> list[Any]:
    parts = [torch.randn(batch, heads, 1, size, dtype=dtype) for size in sizes]
    # A cache with room behind what counts, which was never written.
    rows = [torch.randn(batch, 1, 16, size, dtype=dtype) for size in sizes]
    for each in rows:
        each[:, :, keys:] = torch.nan
    return [*parts, *(each.npu()[:, :, :keys] for each in rows), 0.07]


@pytest.mark.parametrize("heads", [1, 8, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_one_launch_reads_a_cache_where_it_lies(dtype: torch.dtype, heads: int) -> None:
    given = [each.npu() if isinstance(each, Tensor) else each for each in arguments(dtype, heads=heads)]
    op = getattr(torch.ops.liteboost, OP)
    op(*given)  # compared first
    torch.ops.liteboost._npu_forget_counts()
    with recording() as trace:
        found = op(*given)
    assert [launch for launch in trace.ops if "Attention" in launch] == ["aclnnFusedInferAttentionScoreV3"]
    assert not any("Copy" in launch or "Cat" in launch for launch in trace.ops)
    assert native_npu.calls() == [(OP, "", 1)]
    exact = reference(*(each.cpu().double() if isinstance(each, Tensor) else each for each in given))
    assert found.shape == exact.shape and found.is_contiguous()
    assert (found.cpu().double() - exact).abs().max() <= 4 * torch.finfo(dtype).eps


def test_what_the_operator_does_not_take_is_the_references() -> None:
    op = getattr(torch.ops.liteboost, OP)
    cases = {
        "fp32": arguments(torch.float32),
        "sizes other than 512 and 64": arguments(torch.bfloat16, sizes=(128, 64)),
        "heads that are not 1, 2, 4, ... 128": arguments(torch.bfloat16, heads=6),
    }
    for reason, case in cases.items():
        torch.ops.liteboost._npu_forget_counts()
        given = [each.npu() if isinstance(each, Tensor) else each for each in case]
        exact = reference(*(each.cpu().double() if isinstance(each, Tensor) else each for each in given))
        assert (op(*given).cpu().double() - exact).abs().max() <= 0.05
        assert native_npu.calls() == [(OP, reason, 1)]


def steps(model: torch.nn.Module, ids: Tensor, mask: Tensor | None, prompt: int) -> Tensor:
    """The logits of single tokens behind a prompt, float64 on the CPU."""

    def until(end: int) -> Tensor | None:
        return None if mask is None else mask[:, :end]

    with torch.no_grad():
        cache = model(ids[:, :prompt], attention_mask=until(prompt)).past_key_values
        found = [
            model(ids[:, at : at + 1], attention_mask=until(at + 1), past_key_values=cache).logits
            for at in range(prompt, ids.shape[1])
        ]
    return torch.cat(found, 1).double().cpu()


@pytest.mark.parametrize("padded", [False, True])
def test_decode_steps_are_as_near_to_float64_as_the_originals(level: int, padded: bool) -> None:
    """Of a sequence that is padded the keys are expanded: the operator is given no mask there."""
    if not level:
        pytest.skip("level 0 is the original")
    model = deepseek(2)
    ids = torch.randint(3, 1000, (2, 20), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(20) >= torch.tensor([[3], [0]])).long() if padded else None
    exact = steps(copy.deepcopy(model).cpu().double(), ids, mask, 8)
    there = ids.npu(), mask if mask is None else mask.npu(), 8
    with liteboost_adaptor.patched(model, level=0):
        original = steps(model, *there)
    liteboost_adaptor.apply(model, level=level)
    torch.ops.liteboost._npu_forget_counts()
    found = steps(model, *there)
    served = {op for op, reason, _ in native_npu.calls() if not reason}
    assert (OP in served) != padded
    assert (found - exact).norm() <= 1.2 * (original - exact).norm()


def test_a_program_and_its_graph_give_the_text_of_single_steps(level: int) -> None:
    if level != 2:
        pytest.skip("programs are of level 2")
    model = deepseek(2)
    ids = torch.randint(3, 1000, (1, 9), generator=torch.Generator().manual_seed(1)).npu()
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 60, "eos_token_id": None}
    liteboost_adaptor.apply(model, level=1)
    expected = model.generate(ids, **options)
    liteboost_adaptor.undo(model)
    liteboost_adaptor.apply(model, level=2)
    with calls.served() as served:
        found = model.generate(ids, **options)
    assert torch.equal(found, expected)
    assert served.rules["step.program"] and served.rules["step.graph"]
