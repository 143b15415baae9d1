"""`paged_attention` as `LITEBOOST_BATCH_INVARIANT` has it: each query with the bits that it has alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.test_paged_attention import make, one_thread
from support.compare import DTYPES

__all__ = ["one_thread"]  # applies by being here

ops = torch.ops.liteboost
HEADS = [(2, 1), (6, 3), (5, 5), (40, 1)]
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"is_causal": False},
    "window": {"sliding_window": 21},
    "long window": {"sliding_window": 700},
    "endless window": {"sliding_window": 2**63 - 1},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 3.0, "sliding_window": 300},
}
#: New tokens of a request and those before them: nothing, one, a chunk, a prompt, several splits of keys.
REQUESTS = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 2, 7, 64, 65, 150]), st.sampled_from([0, 1, 100, 127, 128, 500, 512, 1100])
    ),
    min_size=1,
    max_size=6,
)


@pytest.fixture(autouse=True)
def any_length() -> Iterator[None]:
    before = ops._batch_invariant_rows()
    ops._set_batch_invariant_rows(2**40, any_length=True)
    yield
    ops._set_batch_invariant_rows(before)


def check(
    dtype: torch.dtype,
    heads: tuple[int, int],
    rows: int,
    option: str,
    lengths: list[tuple[int, int]],
    dim: int = 40,
) -> None:
    """Requests in pages of ``rows`` keys against a call of attention for each query, or for each request."""
    requests = tuple((new, past + new) for new, past in lengths)
    options = dict(OPTIONS[option])
    arguments = make(requests, *heads, dim, dim + 3, rows, dtype) | options
    if "sinks" in options:
        options["sinks"] = arguments["sinks"] = torch.randn(heads[0])
    together = ops.paged_attention(**arguments)
    scaling, is_causal = arguments["scaling"], options.pop("is_causal", True)
    states = [own_keys(arguments, name) for name in ("key", "value")]
    begin = 0
    for request, (new, length) in enumerate(requests):
        key, value = (each[request] for each in states)
        query = arguments["query"][begin : begin + new].transpose(0, 1)[None]
        for first in {0, new // 2, new - 1} if new else ():
            end = length - new + first + 1 if is_causal else length
            one = query[:, :, first : first + 1], key[:, :, :end], value[:, :, :end]
            alone = ops.attention(*one, None, scaling, is_causal, **options)
            assert torch.equal(together[begin + first], alone[0, 0]), f"token {first} of request {request}"
        whole = ops.attention(query, key, value, None, scaling, is_causal, **options)
        assert torch.equal(together[begin : begin + new], whole[0]), f"request {request}"
        begin += new
    for name in ("key", "value"):  # as they lie in a cache of both, heads before rows
        pages = torch.stack([arguments[name], arguments[name] * 0], 1).transpose(2, 3).contiguous()
        other = arguments | {name: pages[:, 0].transpose(1, 2)}
        assert torch.equal(ops.paged_attention(**other), together), f"{name} of other strides"
    packed = [torch.cat([own[0] for own in each], 1).transpose(0, 1)[None] for each in states]
    names = dict(zip(("key", "value"), packed, strict=True))
    assert torch.equal(ops.paged_attention(**arguments | names | {"block_table": None}), together)


def own_keys(arguments: dict[str, Any], name: str) -> list[torch.Tensor]:
    """Of each request, ``[1, kv_heads, keys, channels]``, out of its pages."""
    pages, table = arguments[name], arguments["block_table"]
    lengths = arguments["cu_seqlens_k"].diff().tolist()
    return [
        pages[own[: -(-length // pages.shape[1])].long()].flatten(0, 1)[:length].transpose(0, 1)[None]
        for own, length in zip(table, lengths, strict=True)
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("rows", [7, 32, 256])
def test_requests_beside_each_other(isa: str, dtype: torch.dtype, option: str, rows: int) -> None:
    lengths = [(1, 1100), (65, 500), (1, 0), (150, 0), (0, 40), (7, 128), (1, 600)]
    check(dtype, (6, 3), rows, option, lengths)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.sampled_from(HEADS),
    st.integers(1, 300) | st.sampled_from([16, 128, 256, 512]),
    st.sampled_from(list(OPTIONS)),
    REQUESTS,
    st.sampled_from([1, 40, 64, 130]),
    st.integers(1, 3),
)
def test_requests_of_any_lengths(dtype, heads, rows, option, lengths, dim, threads) -> None:
    torch.set_num_threads(threads)
    check(dtype, heads, rows, option, lengths, dim)
