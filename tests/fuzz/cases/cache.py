"""kv_append."""

from __future__ import annotations

import torch
from fuzz import tensors
from fuzz.bounds import assert_same
from fuzz.table import Case, fuzzes
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor


def _cache(draw: DrawFn, size: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    """Adjacent channels, the other dimensions in any order, with gaps, behind an offset."""
    strides, run = [0, 0, 0, 1], size[3]
    for dim in draw(st.permutations([0, 1, 2])):
        run += draw(st.sampled_from([0, 0, 1, 7]))
        strides[dim] = run
        run *= max(size[dim], 1)
    offset = draw(st.sampled_from([0, 0, 5]))
    elements = offset
    if 0 not in size:
        elements += 1 + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
    return torch.randn(elements).to(dtype).as_strided(size, strides, offset)


def _expected(cache: Tensor, added: Tensor, slots: Tensor) -> Tensor:
    """A copy of ``cache`` with the new rows, each written alone."""
    wanted = cache.clone(memory_format=torch.contiguous_format)
    for batch in range(slots.shape[0]):
        for token in range(slots.shape[1]):
            block, place = divmod(slots[batch, token].item(), cache.shape[2])
            wanted[block, :, place] = added[batch, :, token]
    return wanted


@fuzzes("kv_append")
def kv_append(draw: DrawFn) -> Case:
    dtype, width = draw(tensors.DTYPES), draw(tensors.WIDTHS)
    value_width = draw(st.one_of(st.just(width), tensors.WIDTHS))
    heads, blocks, block_size = draw(st.integers(0, 4)), draw(tensors.COUNTS), draw(st.integers(0, 9))
    batch, length = draw(tensors.COUNTS), draw(tensors.COUNTS)
    if batch * length > blocks * block_size:
        batch, length = 1, blocks * block_size
    slots = torch.randperm(blocks * block_size)[: batch * length].reshape(batch, length)
    if draw(st.booleans()):
        slots = slots.t().contiguous().t()
    arguments = {
        "keys": _cache(draw, (blocks, heads, block_size, width), dtype),
        "values": _cache(draw, (blocks, heads, block_size, value_width), dtype),
        "key": tensors.tensor(draw, (batch, heads, length, width), dtype),
        "value": tensors.tensor(draw, (batch, heads, length, value_width), dtype),
        "slots": slots,
    }

    def check(results: list[Tensor]) -> None:
        keys, values = results
        assert_same(keys, _expected(arguments["keys"], arguments["key"], slots))
        assert_same(values, _expected(arguments["values"], arguments["value"], slots))

    return Case(arguments, check)
