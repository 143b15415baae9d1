"""Attention on the NPU: masks that are added or beside causality, and sinks its operator does not take."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from cann_sim.trace import recording
from torch import Tensor

from liteboost_adaptor import native_npu

ops = torch.ops.liteboost
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
HALVES = (torch.bfloat16, torch.float16)
HEADS = 4


def states(q_len: int, kv_len: int, dtype: torch.dtype, head_dim: int = 64) -> list[Tensor]:
    sizes = ((HEADS, q_len), (2, kv_len), (2, kv_len))
    return [torch.randn(2, heads, length, head_dim).to(dtype) for heads, length in sizes]


def attended(inputs: list[Tensor], reason: str = "", **options: Any) -> tuple[Tensor, Any]:
    """The op's result, held against the reference in fp32, in which the operator adds; and its launches."""
    arguments = {"mask": None, "scaling": 0.125, "is_causal": False} | options
    exact = {
        n: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in arguments.items()
    }
    expected = torch.ops.liteboost_reference.attention(*(x.float() for x in inputs), **exact)
    on_npu = [x.npu() for x in inputs]
    arguments = {n: x.npu() if isinstance(x, Tensor) else x for n, x in arguments.items()}
    ops.attention(*on_npu, **arguments)  # compared where it is first used
    ops._npu_forget_counts()
    with recording() as recorded:
        found = ops.attention(*on_npu, **arguments)
    assert native_npu.calls() == [("attention", reason, 1)]
    assert (found.cpu().float() - expected).abs().max() <= TOLERANCE[inputs[0].dtype]
    return found.cpu(), recorded


def shape_of(q_len: int, kv_len: int, shared: str) -> tuple[int, ...]:
    full = [2, HEADS, q_len, kv_len]
    for axis, name in enumerate(("batch", "heads", "queries", "keys")):
        full[axis] = 1 if name in shared else full[axis]
    return tuple(full)


@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("shared", ["", "heads", "batch", "batch heads", "heads queries", "heads keys"])
@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_float_mask_is_added(dtype: torch.dtype, q_len: int, shared: str, head_dim: int) -> None:
    inputs = states(q_len, 9, dtype, head_dim)
    _, recorded = attended(inputs, mask=2 * torch.randn(shape_of(q_len, 9, shared)).to(dtype))
    before, after = recorded.ops[:-4], recorded.ops[-4:]
    made = ["aclnnEqScalar", "aclnnClampMin", "aclnnInplaceMaskedFillScalar", "aclnnInplaceCopy"]
    assert before == made[:3] or before == made  # the copy is of the heads
    assert after == ["aclnnFusedInferAttentionScoreV3", "aclnnAll", "aclnnLogicalNot", "aclnnInplaceMul"]


@pytest.mark.parametrize("low", [-math.inf, "lowest"])
@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize("dtype", HALVES)
def test_low_entries_hide_exactly(dtype: torch.dtype, q_len: int, low: Any) -> None:
    """What a hidden key and value hold has no influence on any bit of the result."""
    inputs = states(q_len, 9, dtype)
    mask = torch.randn(2, 1, q_len, 9).to(dtype)
    mask[..., 3:6] = torch.finfo(dtype).min if low == "lowest" else low
    first, _ = attended(inputs, mask=mask)
    for x in inputs[1:]:
        x[:, :, 3:6] = 50.0
    second, _ = attended(inputs, mask=mask)
    assert torch.equal(first, second)


@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize("dtype", HALVES)
def test_rows_without_any_number(dtype: torch.dtype, q_len: int, head_dim: int) -> None:
    """Of -inf alone: 0. Of the lowest number alone: the mean. Of both: the mean of the second."""
    lowest = torch.finfo(dtype).min
    mask = torch.zeros(2, HEADS, q_len, 9).to(dtype)
    mask[0, 0, 0] = -math.inf
    mask[0, 1, 0] = lowest
    mask[0, 2, 0] = lowest
    mask[0, 2, 0, ::2] = -math.inf
    inputs = states(q_len, 9, dtype, head_dim)
    found, _ = attended(inputs, mask=mask)
    assert not found[0, 0, 0].any()
    seen = inputs[2][0, 1, 1::2].float().mean(0)
    if dtype == torch.bfloat16:  # of fp16 the lowest number leaves differences between the keys
        assert (found[0, 0, 2].float() - seen).abs().max() <= TOLERANCE[dtype]


@pytest.mark.parametrize("per_query", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize("dtype", HALVES)
def test_sinks_that_the_operator_does_not_take(
    dtype: torch.dtype, q_len: int, head_dim: int, masked: bool, per_query: bool
) -> None:
    sinks = torch.randn(2, HEADS, q_len) if per_query else torch.randn(HEADS)
    mask = None
    if masked:
        mask = torch.randn(2, 1, q_len, 9).to(dtype)
        mask[0, :, 0] = -math.inf
        mask[1, :, 0] = torch.finfo(dtype).min
    found, recorded = attended(states(q_len, 9, dtype, head_dim), mask=mask, sinks=sinks)
    assert "aclnnFusedInferAttentionScoreV4" not in recorded.ops
    assert not masked or not found[:, 0].any()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("q_len", [1, 5])
def test_late_sinks_beside_a_bool_mask_with_empty_rows(q_len: int, dtype: torch.dtype) -> None:
    for head_dim in (64, 96):
        mask = torch.rand(2, 1, q_len, 9) > 0.4
        mask[0, :, 0] = False
        inputs = states(q_len, 9, dtype, head_dim)
        found, _ = attended(inputs, mask=mask, sinks=torch.randn(HEADS))
        assert not found[0, 0].any()


#: The first tier has each mask and each dtype once: a kind is compared over 32768 keys before it is used.
MANY_KEYS = [
    (torch.bfloat16, "heads", 3),
    (torch.float16, "batch heads", 0),
    (torch.float32, "heads queries", 3),
]


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("shared", ["heads", "batch heads", "heads queries"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 9), (5, 9), (9, 9)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_mask_beside_causality(
    dtype: torch.dtype, q_len: int, kv_len: int, shared: str, window: int
) -> None:
    beside_causality(dtype, q_len, kv_len, shared, window)


@pytest.mark.parametrize(
    ("dtype", "shared", "window"),
    [
        pytest.param(*case, marks=() if case in MANY_KEYS else pytest.mark.full)
        for case in itertools.product(TOLERANCE, ("heads", "batch heads", "heads queries"), (0, 3))
    ],
)
def test_a_mask_beside_causality_over_many_keys(dtype: torch.dtype, shared: str, window: int) -> None:
    beside_causality(dtype, 40, 2100, shared, window)


def beside_causality(dtype: torch.dtype, q_len: int, kv_len: int, shared: str, window: int) -> None:
    mask = torch.rand(shape_of(q_len, kv_len, shared)) > 0.3
    _, recorded = attended(states(q_len, kv_len, dtype), mask=mask, is_causal=True, sliding_window=window)
    if q_len > 1:
        assert recorded.ops.count("aclnnTril") == 1 and recorded.ops.count("aclnnLogicalNot") == 1


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("shared", ["", "heads", "heads queries", "heads keys"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 9), (5, 9), (9, 9)])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_float_mask_beside_causality(
    dtype: torch.dtype, q_len: int, kv_len: int, shared: str, window: int
) -> None:
    mask = torch.randn(shape_of(q_len, kv_len, shared)).to(dtype)
    mask[..., :2, 0] = -math.inf  # with causality, the first of 9 queries sees nothing
    attended(states(q_len, kv_len, dtype), mask=mask, is_causal=True, sliding_window=window)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_float_mask_of_a_token_over_a_cache_copies_no_key(dtype: torch.dtype) -> None:
    query = states(1, 1, dtype)[0]
    cache = [torch.randn(2, 2, 40, 64).to(dtype).npu() for _ in range(2)]
    key, value = (x[:, :, :21] for x in cache)
    mask = torch.randn(2, 1, 1, 21).to(dtype).npu()
    arguments = [query.npu(), key, value, mask, 0.125, False, 0, 0.0, None]
    expected = torch.ops.liteboost_reference.attention(
        *(x.cpu().float() if isinstance(x, Tensor) else x for x in arguments)
    )
    ops.attention(*arguments)
    with recording() as recorded:
        found = ops.attention(*arguments)
    assert (found.cpu().float() - expected).abs().max() <= TOLERANCE[dtype]
    (launch,) = (x for x in recorded.launches if x.op == "aclnnFusedInferAttentionScoreV3")
    assert launch.argument("key").tensors[0].address == cache[0].data_ptr()
    assert launch.argument("key").read == 2 * 2 * 21 * 64 * 2
