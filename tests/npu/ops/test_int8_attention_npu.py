"""Attention over keys and values of 8 bits as an aclnn operator, and how they become such."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import npu_ops
from torch import Tensor

from liteboost_adaptor import native_npu
from liteboost_adaptor.ops.int8_attention import int8_attention, quantize_kv
from liteboost_adaptor.ops.int8_linear import quantize_rows

ops = torch.ops.liteboost
pytestmark = pytest.mark.usefixtures("no_grad")
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}
ATTENTION = "aclnnFusedInferAttentionScoreV3"


def apart(states: Tensor, capacity: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Integers and scales on the NPU, the front of a cache, and the same as rows on the CPU."""
    batch, heads, length, size = states.shape
    rows = quantize_kv(states)
    integers = torch.full((batch, heads, max(capacity, length), size), 99, dtype=torch.int8)
    scales = torch.full((batch, heads, max(capacity, length), 1), torch.nan)
    integers[:, :, :length] = rows[..., :size]
    scales[:, :, :length] = rows[..., size:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return integers.npu()[:, :, :length], scales.npu()[:, :, :length], rows


def attend(query: Tensor, key: Tensor, value: Tensor, capacity: int = 0, **options: Any) -> tuple[Any, Any]:
    """Hold the op against the reference in float64; what it launched, and why it was dequantized."""
    arguments = {"mask": None, "scaling": 0.125, "is_causal": True} | options
    (k, k_scales, k_rows), (v, v_scales, v_rows) = apart(key, capacity), apart(value, capacity)
    is_float = {n: isinstance(x, Tensor) and x.is_floating_point() for n, x in arguments.items()}
    on_cpu = {n: x.double() if is_float[n] else x for n, x in arguments.items()}
    expected = int8_attention(query.double(), k_rows, v_rows, **on_cpu)
    there = {n: x.npu() if isinstance(x, Tensor) else x for n, x in arguments.items()}
    tensors = query.npu(), k, k_scales, v, v_scales
    ops._npu_int8_attention(*tensors, **there)  # compared where it is first used
    ops._npu_forget_counts()
    with npu_ops._memory_left_as_it_is(), npu_ops.trace.recording() as recorded:
        found = ops._npu_int8_attention(*tensors, **there)
    assert found.dtype == query.dtype and found.is_contiguous() and found.shape == expected.shape
    assert (found.cpu().double() - expected).abs().max() <= TOLERANCE[query.dtype]
    reasons = [why for op, why, _ in native_npu.calls() if op == "int8_attention"]
    assert len(reasons) == 1
    return recorded, reasons[0]


def states(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("capacity", [0, 40])
@pytest.mark.parametrize("shape", [(1, 2, 2, 13, 64), (3, 4, 1, 33, 128), (2, 8, 2, 1, 96)], ids=str)
def test_one_query_is_one_launch_that_reads_what_counts(
    shape: tuple[int, ...], capacity: int, dtype: torch.dtype
) -> None:
    batch, heads, kv_heads, length, size = shape
    query = states(batch, heads, 1, size, dtype=dtype)
    key, value = (states(batch, kv_heads, length, size, dtype=dtype) for _ in "kv")
    recorded, reason = attend(query, key, value, capacity)
    assert not reason and recorded.ops == [ATTENTION]
    rows = batch * kv_heads * length
    read = {name: recorded.launches[0].argument(name).read for name in ("key", "value")}
    assert read == {"key": rows * size, "value": rows * size}
    assert recorded.launches[0].read <= rows * 2 * (size + 4) + query.nbytes


@pytest.mark.parametrize("options", [{}, {"is_causal": False}, {"sliding_window": 5}], ids=str)
@pytest.mark.parametrize("capacity", [0, 40])
@pytest.mark.parametrize("queries", [2, 16])
def test_several_queries_in_bf16(queries: int, capacity: int, options: dict[str, Any]) -> None:
    query, key, value = states(2, 6, queries, 64), states(2, 2, 21, 64), states(2, 2, 21, 64)
    recorded, reason = attend(query, key, value, capacity, **options)
    assert not reason
    assert [op for op in recorded.ops if "Attention" in op] == [ATTENTION]
    assert set(recorded.ops) <= {ATTENTION, "aclnnInplaceCopy"}  # its result has heads first


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("size", [64, 96])
def test_masks(queries: int, batches: int, size: int) -> None:
    query, key, value = states(2, 4, queries, size), states(2, 2, 19, size), states(2, 2, 19, size)
    mask = torch.rand(batches, 1, queries, 19) > 0.4
    mask[-1, :, 0] = False
    _, reason = attend(query, key, value, 40, mask=mask, is_causal=False)
    assert not reason


def test_a_window_of_one_query() -> None:
    query, key, value = states(2, 4, 1, 64), states(2, 2, 30, 64), states(2, 2, 30, 64)
    recorded, reason = attend(query, key, value, 40, sliding_window=7)
    assert not reason and recorded.ops[-1] == ATTENTION
    assert recorded.launches[-1].argument("key").read <= 2 * 2 * 7 * 64


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("start", [1, 5, 8, 19])
def test_a_window_that_begins_anywhere_is_read_where_it_lies(start: int, is_masked: bool) -> None:
    """Scales are of 4 bytes, and the operator loads from every eighth."""
    query, length = states(2, 4, 1, 64), 30
    key, value = states(2, 2, length, 64), states(2, 2, length, 64)
    tensors, rows = [query.npu()], []
    for each in (key, value):
        integers, scales, kept = apart(each)
        for part in (integers, scales):  # as much memory behind as one head has of it
            memory = part.new_full((2 * 2 * 64 + 64, part.shape[3]), 99)
            inside = memory[: 2 * 2 * 64].view(2, 2, 64, -1)[:, :, start : start + length]
            tensors.append(inside.copy_(part))
        rows.append(kept)
    mask = torch.rand(2, 1, 1, length) > 0.4 if is_masked else None
    form = (0.125, True, 0, 0.0, None)
    expected = int8_attention(query.double(), *rows, mask, *form)
    there = None if mask is None else mask.npu()
    ops._npu_int8_attention(*tensors, there, *form)  # compared where it is first used
    with npu_ops._memory_left_as_it_is(), npu_ops.trace.recording() as recorded:
        found = ops._npu_int8_attention(*tensors, there, *form)
    assert (found.cpu().double() - expected).abs().max() <= TOLERANCE[query.dtype]
    (attention,) = [each for each in recorded.launches if each.op == ATTENTION]
    before = start % 8 if is_masked else 0  # read, and hidden
    assert attention.argument("key").read == 2 * 2 * (length + before) * 64
    assert max(each.written for each in recorded.launches) < 2 * 2 * length * 64  # no copy of keys


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        ("more than 16 queries", {"query": (1, 4, 17, 64)}),
        ("several queries in fp16", {"query": (1, 4, 3, 64), "dtype": torch.float16}),
        ("a head size that is no multiple of 32", {"query": (1, 4, 1, 48)}),
        ("a softcap", {"query": (1, 4, 1, 64), "softcap": 5.0}),
        ("more than 64 query heads for a key head", {"query": (1, 130, 1, 64)}),
        ("sinks", {"query": (1, 4, 1, 64), "sinks": torch.randn(4).bfloat16()}),
        ("a float mask", {"query": (1, 4, 3, 64), "mask": torch.randn(1, 1, 3, 19).bfloat16()}),
        ("a head size that is no multiple of 16", {"query": (1, 4, 1, 40), "dtype": torch.float32}),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_the_operator_does_not_take_is_multiplied_out_and_counted(
    reason: str, options: dict[str, Any]
) -> None:
    shape, dtype = options.pop("query"), options.pop("dtype", torch.bfloat16)
    query, key, value = states(*shape, dtype=dtype), *(states(1, 2, 19, shape[3], dtype=dtype) for _ in "kv")
    options.setdefault("is_causal", "mask" not in options)
    _, found = attend(query, key, value, 40, **options)
    assert found == reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 2, 1, 64), (2, 3, 5, 96), (7, 33)], ids=str)
def test_rows_are_one_launch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    x.view(-1, shape[-1])[0] = 0
    there = x.npu()
    ops._npu_quantize_kv(there)
    with npu_ops._memory_left_as_it_is(), npu_ops.trace.recording() as recorded:
        integers, scales = ops._npu_quantize_kv(there)
    assert recorded.ops == ["aclnnDynamicQuant"]
    assert integers.dtype == torch.int8 and integers.shape == x.shape
    assert scales.dtype == torch.float32 and scales.shape == (*shape[:-1], 1)
    exact, own = quantize_rows(x)
    assert (integers.cpu().int() - exact.int()).abs().max() <= 1  # a division where the CPU multiplies
    values = integers.cpu().double() * scales.cpu().double()
    assert ((values - x.double()).abs() <= 0.501 * own.double()).all()


@pytest.mark.parametrize("shape", [(2, 3, 4, 64), (1, 1, 1, 66)], ids=str)
def test_rows_in_fp32_are_the_reference(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    ops._npu_forget_counts()
    integers, scales = ops._npu_quantize_kv(x.npu())
    assert native_npu.calls() == [("quantize_kv", "fp32", 1)]
    rows = quantize_kv(x)
    assert torch.equal(integers.cpu(), rows[..., : shape[-1]])
    assert torch.equal(scales.cpu().view(torch.int8), rows[..., shape[-1] :])


def test_rows_with_their_scales_behind_them_are_taken_apart() -> None:
    query = torch.randn(2, 4, 1, 64).bfloat16()
    key, value = (quantize_kv(torch.randn(2, 2, 19, 64)) for _ in "kv")
    arguments = {"query": query, "key": key, "value": value, "mask": None, "scaling": 0.125}
    found = npu_ops.run("int8_attention", **arguments)
    assert found.reasons == [] and found.launches[-1] == ATTENTION.removeprefix("aclnn")
    exact = int8_attention(query.double(), key, value, None, 0.125)
    assert (found.results[0].double() - exact).abs().max() <= TOLERANCE[query.dtype]
