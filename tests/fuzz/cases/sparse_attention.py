"""block_sparse_attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from fuzz import tensors
from fuzz.cases.attention import check
from fuzz.table import Case, fuzzes
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

DIMS = st.one_of(st.sampled_from([0, 1, 8, 16, 17, 33, 64, 80, 128]), st.integers(0, 140))
LENGTHS = st.one_of(st.sampled_from([0, 1, 2, 3, 16, 17, 33, 64, 65, 129]), st.integers(0, 200))
BLOCKS = st.sampled_from([1, 3, 5, 7, 16, 17, 32, 64, 100, 128, 300])


def _lists(draw: DrawFn, rows: int, heads: int, blocks: int) -> tuple[Tensor, Tensor]:
    """Any blocks, any number of them, in lists that may be longer than they need to be."""
    chosen = torch.rand(rows, heads, blocks) < draw(st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]))
    numbers = torch.where(chosen, torch.arange(blocks), blocks).sort(-1).values
    numbers = numbers.masked_fill(numbers == blocks, -1)
    counts = chosen.sum(-1)
    most = max(int(counts.max()), draw(st.sampled_from([0, 0, blocks]))) if counts.numel() else blocks
    return numbers[..., :most], counts


def _strided(draw: DrawFn, table: Tensor) -> Tensor:
    return torch.stack([table, table], -1)[..., 1] if draw(st.booleans()) else table


@fuzzes("block_sparse_attention")
def block_sparse_attention(draw: DrawFn) -> Case:
    dtype = draw(tensors.DTYPES)
    batch, kv_heads = draw(st.sampled_from([1, 1, 2, 0])), draw(st.sampled_from([1, 1, 2, 3, 0]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 4, 5, 0]))
    q_len, kv_len, dim = draw(LENGTHS), draw(LENGTHS), draw(DIMS)
    value_dim = dim if draw(st.booleans()) else draw(DIMS)
    block_shape = [draw(BLOCKS), draw(BLOCKS)]
    choosing = draw(st.sampled_from([heads, kv_heads]))
    rows, blocks = batch * -(-q_len // block_shape[0]), -(-kv_len // block_shape[1])
    select_idx, select_num_idx = _lists(draw, rows, choosing, blocks)
    arguments: dict[str, Any] = {
        "query": tensors.tensor(draw, (batch, heads, q_len, dim), dtype),
        "key": tensors.tensor(draw, (batch, kv_heads, kv_len, dim), dtype),
        "value": tensors.tensor(draw, (batch, kv_heads, kv_len, value_dim), dtype, draw(tensors.SCALES)),
        "select_idx": _strided(draw, select_idx),
        "select_num_idx": _strided(draw, select_num_idx),
        "block_shape": block_shape,
        "scaling": draw(st.sampled_from([0.125, 1.0 / math.sqrt(max(dim, 1)), 1.0, 0.0, -0.25])),
        "is_causal": draw(st.booleans()),
    }
    return Case(arguments, lambda results: check("block_sparse_attention", results[0], arguments))
