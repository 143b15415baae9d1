"""Attention over a part of the keys on the NPU: one operator that returns the logarithms of its sums, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cann_sim.trace import recording
from torch import Tensor

from liteboost_adaptor import native_npu
from liteboost_adaptor.ops.attention_part import joined

ops = torch.ops.liteboost
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}
HALVES = (torch.bfloat16, torch.float16)


def states(q_len: int, kv_len: int, dtype: torch.dtype) -> list[Tensor]:
    sizes = ((4, q_len), (2, kv_len), (2, kv_len))
    return [torch.randn(2, heads, length, 64).to(dtype) for heads, length in sizes]


def part(inputs: list[Tensor], reason: str = "", **options: Any) -> tuple[Tensor, Tensor, Any]:
    """The op's results, held against the reference in fp32, and its launches."""
    arguments = {"mask": None, "scaling": 0.125} | options
    output, lse = torch.ops.liteboost_reference.attention_part(*(x.float() for x in inputs), **arguments)
    arguments = {n: x.npu() if isinstance(x, Tensor) else x for n, x in arguments.items()}
    # As they lie in a model: positions before heads.
    on_npu = [x.transpose(1, 2).contiguous().npu().transpose(1, 2) for x in inputs]
    ops.attention_part(*on_npu, **arguments)  # compared where it is first used
    ops._npu_forget_counts()
    with recording() as recorded:
        found, found_lse = ops.attention_part(*on_npu, **arguments)
    assert native_npu.calls() == [("attention_part", reason, 1)]
    assert found.dtype == found_lse.dtype == torch.float32
    assert found.shape == output.shape and found_lse.shape == lse.shape
    tolerance = TOLERANCE[inputs[0].dtype]
    assert (found.cpu() - output).abs().max() <= tolerance
    seeing = lse.isfinite()
    assert torch.equal(found_lse.cpu().isfinite(), seeing)
    assert ((found_lse.cpu() - lse)[seeing].abs() <= tolerance).all()
    return found.cpu(), found_lse.cpu(), recorded


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_prompt(dtype: torch.dtype) -> None:
    *_, trace = part(states(12, 12, dtype), is_causal=True)
    # The result in fp32, and the sums beside it, are put in order behind it.
    assert trace.launches[0].op == "aclnnFusedInferAttentionScoreV3"
    assert len(trace.launches) == 3
    part(states(7, 20, dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_token(dtype: torch.dtype) -> None:
    *_, trace = part(states(1, 33, dtype))
    assert len(trace.launches) == 2
    longer = states(1, 40, dtype)
    with_room = [longer[0], longer[1][:, :, :33], longer[2][:, :, :33]]
    part(with_room)


@pytest.mark.parametrize("q_len", [1, 9])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_queries_that_see_no_key(dtype: torch.dtype, q_len: int) -> None:
    mask = torch.rand(2, 1, q_len, 16) < 0.5
    mask[..., 3] = True
    mask[1, :, -1] = False
    output, lse, _ = part(states(q_len, 16, dtype), mask=mask)
    assert not output[1, -1].any() and lse[1, -1].eq(-torch.inf).all()


def test_parts_are_the_whole() -> None:
    query, key, value = states(5, 30, torch.bfloat16)
    first = part([query, key[:, :, :11], value[:, :, :11]])[:2]
    second = part([query, key[:, :, 11:], value[:, :, 11:]], is_causal=True)[:2]
    found, _ = joined(*first, *second)
    exact = torch.ops.liteboost_reference.attention(
        query.float(), key.float(), value.float(), None, 0.125, True
    )
    # As far as attention itself may be, which rounds once.
    assert (found - exact).abs().max() <= TOLERANCE[torch.bfloat16]


def test_what_no_operator_takes() -> None:
    part(states(5, 5, torch.float32), "fp32", is_causal=True)
    part(states(5, 5, torch.bfloat16), "a softcap", softcap=2.0)
    part(states(5, 5, torch.bfloat16), "a float mask", mask=torch.randn(1, 1, 5, 5))
    part(states(1, 0, torch.bfloat16), "no elements")
