"""Attention over a part of a preallocated cache: read where it lies, and no more of it than counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cann_sim.trace import recording
from torch import Tensor

from liteboost_adaptor import native_npu

ops = torch.ops.liteboost
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}
HEADS, KV_HEADS, HEAD_DIM, CAPACITY = 8, 2, 64, 40
HEADS_FIRST, POSITIONS_FIRST = "heads first", "positions first"


def cache(order: str, batch: int, dtype: torch.dtype, capacity: int = CAPACITY) -> Tensor:
    """``[batch, KV_HEADS, capacity, HEAD_DIM]`` on the NPU, contiguous in the order given."""
    if order == HEADS_FIRST:
        return torch.randn(batch, KV_HEADS, capacity, HEAD_DIM).to(dtype).npu()
    return torch.randn(batch, capacity, KV_HEADS, HEAD_DIM).to(dtype).npu().transpose(1, 2)


def part(states: Tensor, begin: int, end: int) -> Tensor:
    """Those positions; what follows them in memory is made NaN."""
    states[:, :, end:] = torch.nan
    return states[:, :, begin:end]


def attended(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """Run the op, hold it against the reference in float64, and give what it launched."""
    arguments = {"mask": None, "scaling": 0.125, "is_causal": True} | options
    on_cpu = {n: x.cpu() if isinstance(x, Tensor) else x for n, x in arguments.items()}
    expected = torch.ops.liteboost_reference.attention(
        *(x.cpu().double() for x in (query, key, value)), **on_cpu
    )
    ops.attention(query, key, value, **arguments)  # compared where it is first used
    ops._npu_forget_counts()
    with recording() as recorded:
        found = ops.attention(query, key, value, **arguments)
    assert native_npu.calls() == [("attention", "", 1)]
    assert (found.cpu().double() - expected).abs().max() <= TOLERANCE[query.dtype]
    return recorded


def bytes_of(batch: int, positions: int) -> int:
    return batch * KV_HEADS * positions * HEAD_DIM * 2


def reads_in_place(recorded: Any, states: Tensor, batch: int, positions: int) -> None:
    """The only launch is the operator's; it reads so many positions, of the memory of ``states``."""
    assert recorded.ops == ["aclnnFusedInferAttentionScoreV3"]
    key = recorded.launches[0].argument("key")
    assert key.read == bytes_of(batch, positions)
    (given,) = key.tensors
    storage = states.untyped_storage()
    assert storage.data_ptr() <= given.address
    assert given.address + given.bytes <= storage.data_ptr() + storage.nbytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("order", [HEADS_FIRST, POSITIONS_FIRST])
@pytest.mark.parametrize("length", [1, 13, CAPACITY])
def test_a_token_reads_the_front_of_a_cache(length: int, order: str, batch: int, dtype: torch.dtype) -> None:
    key, value = (part(cache(order, batch, dtype), 0, length) for _ in range(2))
    recorded = attended(torch.randn(batch, HEADS, 1, HEAD_DIM).to(dtype).npu(), key, value)
    reads_in_place(recorded, key, batch, length)


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("order", [HEADS_FIRST, POSITIONS_FIRST])
def test_a_prompt_reads_the_front_of_a_cache_by_its_length(order: str, window: int) -> None:
    """The diagonal ends with the positions that count, not with the cache."""
    key, value = (part(cache(order, 2, torch.bfloat16), 0, 21) for _ in range(2))
    query = torch.randn(2, HEADS, 5, HEAD_DIM).bfloat16().npu()
    if order == POSITIONS_FIRST:
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
    recorded = attended(query, key, value, sliding_window=window)
    reads_in_place(recorded, key, 2, 21 if not window else window + 4)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("order", [HEADS_FIRST, POSITIONS_FIRST])
def test_a_mask_of_a_token_is_widened_and_the_cache_is_not_copied(order: str, batch: int) -> None:
    """The operator wants a mask for every position of the cache, and reads those that count."""
    key, value = (part(cache(order, batch, torch.bfloat16), 0, 21) for _ in range(2))
    mask = torch.rand(batch, 1, 1, 21) > 0.4
    mask[0] = False
    query = torch.randn(batch, HEADS, 1, HEAD_DIM).bfloat16().npu()
    recorded = attended(query, key, value, mask=mask.npu(), is_causal=False)
    # Of one sequence with its positions first, what counts is the whole tensor.
    widened = [] if order == POSITIONS_FIRST and batch == 1 else ["aclnnConstantPadNd"]
    assert recorded.ops == ["aclnnLogicalNot", *widened, "aclnnFusedInferAttentionScoreV3"]
    assert recorded.launches[-1].argument("key").read == bytes_of(batch, 21)
    assert recorded.launches[-1].argument("mask").read <= batch * CAPACITY


@pytest.mark.parametrize("length", [21, CAPACITY])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("order", [HEADS_FIRST, POSITIONS_FIRST])
def test_a_window_in_decode_reads_no_more_than_its_keys(order: str, batch: int, length: int) -> None:
    key, value = (part(cache(order, batch, torch.bfloat16), 0, length) for _ in range(2))
    query = torch.randn(batch, HEADS, 1, HEAD_DIM).bfloat16().npu()
    recorded = attended(query, key, value, sliding_window=6)
    launch = recorded.launches[-1]
    assert launch.op == "aclnnFusedInferAttentionScoreV3"
    assert launch.argument("key").read == bytes_of(batch, 6)
    # How many positions follow the last is a tensor: the zero is kept, others are written.
    assert recorded.ops[:-1] in ([], ["aclnnInplaceFillScalar"])
    if length == CAPACITY:
        assert recorded.ops[:-1] == []


def test_a_window_with_a_mask_takes_its_part_of_both() -> None:
    key, value = (part(cache(HEADS_FIRST, 2, torch.bfloat16), 0, 21) for _ in range(2))
    mask = torch.ones(2, 1, 1, 21, dtype=torch.bool)
    mask[:, ..., -2] = False
    query = torch.randn(2, HEADS, 1, HEAD_DIM).bfloat16().npu()
    attended(query, key, value, mask=mask.npu(), sliding_window=6)


def test_a_part_that_would_reach_beyond_its_memory_is_copied() -> None:
    whole = [cache(HEADS_FIRST, 2, torch.bfloat16) for _ in range(2)]
    key, value = (part(x, 9, 30) for x in whole)  # as long as the cache from 9 on, it would end behind it
    recorded = attended(torch.randn(2, HEADS, 1, HEAD_DIM).bfloat16().npu(), key, value)
    launch = recorded.launches[-1]
    assert launch.argument("key").tensors[0].shape == (2, KV_HEADS, 21, HEAD_DIM)
    # With more memory behind it, it is read there.
    key, value = (torch.cat((x, x))[:2, :, 9:30] for x in whole)
    recorded = attended(torch.randn(2, HEADS, 1, HEAD_DIM).bfloat16().npu(), key, value)
    reads_in_place(recorded, key, 2, 21)


def test_caches_of_different_sizes_are_copied() -> None:
    key = part(cache(HEADS_FIRST, 2, torch.bfloat16), 0, 21)
    value = part(cache(HEADS_FIRST, 2, torch.bfloat16, CAPACITY + 8), 0, 21)
    recorded = attended(torch.randn(2, HEADS, 1, HEAD_DIM).bfloat16().npu(), key, value)
    assert recorded.launches[-1].argument("key").tensors[0].shape == (2, KV_HEADS, 21, HEAD_DIM)


@pytest.mark.parametrize("order", [HEADS_FIRST, POSITIONS_FIRST])
def test_full_precision_copies(order: str) -> None:
    key, value = (part(cache(order, 2, torch.float32), 0, 21) for _ in range(2))
    query = torch.randn(2, HEADS, 1, HEAD_DIM).npu()
    assert attended(query, key, value).ops[-1] == "aclnnFlashAttentionScore"


def test_the_order_is_the_one_that_copies_less() -> None:
    """A prompt of few queries over a long cache: they are copied, not the cache."""
    key, value = (part(cache(HEADS_FIRST, 2, torch.bfloat16), 0, CAPACITY) for _ in range(2))
    query = torch.randn(2, 5, HEADS, HEAD_DIM).bfloat16().npu().transpose(1, 2)
    layouts = []
    for others in ((key, value), tuple(x[:, :, :5].clone() for x in (key, value))):
        launch = attended(query, *others).launches[-1]
        layouts.append(launch.argument("layout").value)
    assert layouts == ["BNSD_BSND", "BSND"]
