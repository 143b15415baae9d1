"""paged_attention."""

from __future__ import annotations

import math

import torch
from fuzz import tensors
from fuzz.bounds import FP32, TINY, assert_within, exact
from fuzz.cases.attention import largest_of, norm_of
from fuzz.table import Case, fuzzes
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

PAGE_ROWS = st.one_of(st.sampled_from([1, 16, 32, 48]), st.integers(1, 40))
LENGTHS = st.one_of(st.sampled_from([1, 1, 1, 2, 5, 17]), st.integers(0, 40))
KEYS = st.one_of(st.sampled_from([0, 1, 16, 33, 64, 129]), st.integers(0, 150))
HEAD_DIMS = st.one_of(st.sampled_from([1, 8, 16, 33, 64, 128]), st.integers(0, 140))


def _sums(draw: DrawFn, lengths: list[int]) -> Tensor:
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


@fuzzes("paged_attention")
def paged_attention(draw: DrawFn) -> Case:
    dtype, dim = draw(tensors.DTYPES), draw(HEAD_DIMS)
    value_dim = dim if draw(st.booleans()) else draw(HEAD_DIMS)
    kv_heads = draw(st.sampled_from([1, 1, 2, 3]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 4, 5]))
    requests = draw(st.lists(st.tuples(LENGTHS, KEYS), max_size=4))
    rows = draw(PAGE_ROWS)
    counts = [-(-keys // rows) for _, keys in requests]
    paged = draw(st.integers(0, 4)) > 0
    if paged:
        pages = max(counts, default=0) + draw(st.integers(0, 3))
        columns = max(counts, default=0) + draw(st.integers(0, 2))
        table = torch.randint(-5, 10**6, (len(requests), columns), dtype=torch.int32)
        for request, count in enumerate(counts):  # each of its own; requests may share
            table[request, :count] = torch.randperm(pages)[:count]
    else:
        pages, rows, table = 1, sum(keys for _, keys in requests) + draw(st.integers(0, 3)), None
    is_causal = draw(st.booleans())
    arguments = {
        "query": tensors.tensor(
            draw, (sum(q for q, _ in requests) + draw(st.integers(0, 2)), heads, dim), dtype
        ),
        "key": tensors.tensor(draw, (pages, rows, kv_heads, dim), dtype),
        "value": tensors.tensor(draw, (pages, rows, kv_heads, value_dim), dtype, draw(tensors.SCALES)),
        "cu_seqlens_q": _sums(draw, [q for q, _ in requests]),
        "cu_seqlens_k": _sums(draw, [keys for _, keys in requests]),
        "block_table": table,
        "scaling": draw(st.sampled_from([0.125, 1.0 / math.sqrt(max(dim, 1)), 0.0, -0.25])),
        "is_causal": is_causal,
        "sliding_window": draw(st.sampled_from([0, 0, 1, 5, 40, 2**62])) if is_causal else 0,
        "softcap": draw(st.sampled_from([0.0, 0.0, 5.0])),
        "sinks": tensors.maybe(draw, (heads,), tensors.same_or_float32(draw, dtype)),
    }
    return Case(arguments, lambda results: _check(results[0], arguments))


def _check(result: Tensor, arguments: dict) -> None:
    """As that of attention, without masks."""
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    (want,) = exact("paged_attention", arguments)
    assert result.dtype == query.dtype
    if not want.numel():
        return assert_within(result, want, 0.0)
    largest = largest_of(value)
    logits = abs(arguments["scaling"]) * norm_of(query) * norm_of(key) + arguments["softcap"]
    error = (16 + query.shape[-1] / 2) * FP32 * logits
    keys = arguments["cu_seqlens_k"].diff().max().item() if arguments["cu_seqlens_k"].numel() > 1 else 0
    sums = 2 * (32 + min(keys, 256) + keys) * FP32  # blocks may be as short as a page
    unit = torch.finfo(query.dtype).eps
    bound = unit * (want.abs() + largest) + (sums + 2 * math.expm1(2 * error)) * largest + TINY[query.dtype]
    assert_within(result, want, bound)
