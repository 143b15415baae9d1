"""`liteboost::paged_attention` against float64: pages, spans, masks, strides, at every instruction set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.attention_cases import DTYPES, FLOOR, NAN, double, eager, one_thread
from torch import Tensor

from liteboost_adaptor.ops.paged_attention import paged_attention as reference

__all__ = ["one_thread"]  # applies by being here

paged_attention = torch.ops.liteboost.paged_attention

#: (queries, keys) of each request: decoding, a prompt, a chunk behind a prefix, none, more queries than keys.
MIXED = ((1, 129), (37, 37), (1, 5), (20, 290), (0, 40), (1, 1), (70, 70), (3, 0), (9, 4))
DECODE = ((1, 300), (1, 17), (1, 64), (1, 1))


def sums(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(dtype)


def make(
    requests: tuple[tuple[int, int], ...],
    heads: int,
    kv_heads: int,
    dim: int,
    value_dim: int,
    rows: int,
    dtype: torch.dtype,
    spare: int = 3,
) -> dict[str, Any]:
    """Pages in any order, with others between them; what no request has is NaN."""
    counts = [-(-keys // rows) for _, keys in requests]
    order = torch.randperm(sum(counts) + spare)
    table = torch.full((len(requests), max(counts) + 1), -1, dtype=torch.int32)
    key = torch.randn(len(order), rows, kv_heads, dim).to(dtype)
    value = torch.randn(len(order), rows, kv_heads, value_dim).to(dtype)
    taken = torch.zeros(len(order), rows, dtype=torch.bool)
    first = 0
    for request, (count, (_, keys)) in enumerate(zip(counts, requests, strict=True)):
        table[request, :count] = order[first : first + count]
        own = torch.arange(count * rows).reshape(count, rows) < keys
        taken[order[first : first + count]] = own
        first += count
    key[~taken], value[~taken] = NAN, NAN
    return {
        "query": torch.randn(sum(q for q, _ in requests), heads, dim).to(dtype),
        "key": key,
        "value": value,
        "cu_seqlens_q": sums([q for q, _ in requests]),
        "cu_seqlens_k": sums([k for _, k in requests]),
        "block_table": table,
        "scaling": 1.3 * max(dim, 1) ** -0.5,
    }


def by_itself(
    function: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    block_table: Tensor | None,
    scaling: float,
    is_causal: bool = True,
    **options: Any,
) -> Tensor:
    """Each request with its keys taken out of the pages row by row."""
    rows, parts = key.shape[1], []
    for request in range(len(cu_seqlens_q) - 1):
        first, last = cu_seqlens_q[request : request + 2].tolist()
        begin, end = cu_seqlens_k[request : request + 2].tolist()
        place = torch.arange(begin, end) if block_table is None else torch.arange(end - begin)
        page = (
            place.new_zeros(len(place)) if block_table is None else block_table[request][place // rows].long()
        )
        states = [cache[page, place % rows].transpose(0, 1)[None] for cache in (key, value)]
        one = query[first:last].transpose(0, 1)[None]
        parts.append(function(one, *states, None, scaling, is_causal=is_causal, **options)[0])
    rest = len(query) - int(cu_seqlens_q[-1])
    return torch.cat([*parts, query.new_zeros(rest, query.shape[1], value.shape[3])])


def check(arguments: dict[str, Any]) -> Tensor:
    query, value = arguments["query"], arguments["value"]
    result = paged_attention(**arguments)
    exact = by_itself(eager, **{name: double(argument) for name, argument in arguments.items()})
    assert result.shape == exact.shape and result.dtype == query.dtype and result.is_contiguous()
    if not result.numel():
        return result
    largest = value.double().nan_to_num(0.0).abs().max()
    error = (result.double() - exact).abs()
    assert (error <= torch.finfo(query.dtype).eps * (exact.abs() + largest) + 2e-6 * largest).all()
    original = by_itself(eager, **arguments).double() - exact
    assert error.norm() <= 1.5 * original.norm() + FLOOR[query.dtype] * exact.norm() + 1e-30
    return result


OPTIONS = {
    "causal": {},
    "full": {"is_causal": False},
    "window": {"sliding_window": 21},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "everything": {"sinks": True, "softcap": 2.0, "sliding_window": 40},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 16, 20, 48, 256])
@pytest.mark.parametrize("option", OPTIONS)
def test_pages(isa: str, dtype: torch.dtype, rows: int, option: str) -> None:
    for requests, heads, dim, value_dim in ((MIXED, (4, 2), 16, 24), (DECODE, (6, 2), 33, 17)):
        arguments = make(requests, *heads, dim, value_dim, rows, dtype) | OPTIONS[option]
        if "sinks" in arguments:
            arguments["sinks"] = torch.randn(heads[0])
        result = check(arguments)
        assert not result.isnan().any()  # nothing of other pages was read


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [20, 256])
def test_threads_read_whole_rows(isa: str, dtype: torch.dtype, rows: int) -> None:
    """All kv heads of a part of a request's keys by one thread, where each request has few rows."""
    lengths = (1, 2100, 64, 777, 130, 3, 1030, 500)  # of which some are several parts
    for queries, heads in ((1, (8, 4)), (3, (4, 4)), (2, (10, 5))):
        requests = tuple((queries, keys) for keys in lengths)
        arguments = make(requests, *heads, 64, 64, rows, dtype)
        alone = check(arguments)
        torch.set_num_threads(3)
        try:
            torch.testing.assert_close(paged_attention(**arguments), alone, rtol=0, atol=2e-2)
            check(arguments | {"softcap": 3.0})
        finally:
            torch.set_num_threads(1)
    values_are_wider = make(requests, 4, 2, 32, 48, rows, dtype)
    check(values_are_wider)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 15, 64, 80, 128, 130])
def test_head_sizes_and_groups(isa: str, dtype: torch.dtype, dim: int) -> None:
    for heads, kv_heads in ((1, 1), (4, 4), (8, 1), (20, 1)):
        check(make(((1, 70), (18, 33)), heads, kv_heads, dim, dim, 16, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_a_table_keys_lie_one_after_the_other(isa: str, dtype: torch.dtype) -> None:
    arguments = make(MIXED, 4, 2, 16, 16, 300, dtype)
    tokens = int(arguments["cu_seqlens_k"][-1])
    arguments |= {
        "block_table": None,
        "key": torch.randn(1, tokens + 2, 2, 16).to(dtype),
        "value": torch.randn(1, tokens + 2, 2, 16).to(dtype),
    }
    check(arguments)
    check(arguments | {"sliding_window": 30})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_offsets_and_integers(isa: str, dtype: torch.dtype) -> None:
    """Query as a projection leaves it; keys and values in one memory in turn, as a cache has them."""
    arguments = make(MIXED, 4, 2, 16, 16, 16, dtype)
    memory = torch.full((len(arguments["key"]), 2, 16, 2, 21), NAN).to(dtype)
    memory[:, 0, ..., 3:19], memory[:, 1, ..., 3:19] = arguments["key"], arguments["value"]
    expected = check(arguments)
    tokens = len(arguments["query"])
    heads_first = arguments["query"].transpose(0, 1).contiguous().transpose(0, 1)
    in_one = torch.randn(tokens, 6, 16).to(dtype)
    in_one[:, 1:5] = arguments["query"]
    changed = {
        "cache": {"key": memory[:, 0, ..., 3:19], "value": memory[:, 1, ..., 3:19]},
        "heads first": {"query": heads_first},
        "slice": {"query": in_one[:, 1:5]},
        "apart": {"query": arguments["query"].repeat_interleave(2, 2)[..., ::2]},
        "keys apart": {"key": arguments["key"].repeat_interleave(2, 3)[..., ::2]},
        "int64": {name: arguments[name].long() for name in ("cu_seqlens_q", "block_table")},
        "table": {"block_table": arguments["block_table"].repeat_interleave(2, 1)[:, ::2]},
    }
    for label, change in changed.items():
        assert torch.equal(paged_attention(**arguments | change), expected), label


def test_tokens_of_no_request_are_zero(isa: str) -> None:
    arguments = make(((3, 7), (2, 2)), 2, 1, 16, 16, 4, torch.float32)
    arguments["query"] = torch.cat([arguments["query"], torch.full((4, 2, 16), NAN)])
    result = check(arguments)
    assert not result[5:].any() and result[:5].all(-1).all()


def test_shared_pages_give_the_same(isa: str) -> None:
    arguments = make(((1, 40), (1, 40)), 2, 1, 16, 16, 16, torch.float32)
    arguments["block_table"][1] = arguments["block_table"][0]
    arguments["query"][1] = arguments["query"][0]
    result = paged_attention(**arguments)
    assert torch.equal(result[0], result[1])


def test_nothing_at_all() -> None:
    arguments = make(((0, 0),), 2, 1, 16, 16, 4, torch.float32)
    assert paged_attention(**arguments).shape == (0, 2, 16)
    none = {
        "cu_seqlens_q": torch.zeros(1, dtype=torch.int32),
        "cu_seqlens_k": torch.zeros(1, dtype=torch.int32),
        "block_table": arguments["block_table"][:0],
    }
    assert paged_attention(**arguments | none).shape == (0, 2, 16)
    arguments = make(((2, 3),), 2, 1, 0, 5, 4, torch.float32)
    torch.testing.assert_close(paged_attention(**arguments), reference(**arguments))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (6, 2)], ids=str)
def test_every_plan(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    """Numbers of threads lead to other cuts of requests, queries and keys, which must not show."""
    before = torch.get_num_threads()
    arguments = make(((1, 3000), (150, 150), (1, 700), (1, 1), (40, 900)), *heads, 32, 32, 64, dtype)
    try:
        for window in (0, 500):
            for threads in (1, 3, 8):
                torch.set_num_threads(threads)
                check(arguments | {"sliding_window": window})
    finally:
        torch.set_num_threads(before)


WRONG = {
    "falls": ({"cu_seqlens_q": sums([3, -1])}, ValueError, "cu_seqlens_q must begin with 0 and not fall"),
    "begins": ({"cu_seqlens_k": sums([7, 2]) + 1}, ValueError, "cu_seqlens_k must begin with 0"),
    "beyond": ({"cu_seqlens_q": sums([3, 9])}, ValueError, "must not go beyond the 5 tokens of query"),
    "page": ({"block_table": torch.tensor([[0, 99], [1, 0]])}, ValueError, "below the pages of key, got 99"),
    "negative": ({"block_table": torch.tensor([[0, 2], [-1, 0]])}, ValueError, "got -1 in row 1"),
    "short": ({"block_table": torch.tensor([[0], [1]])}, ValueError, "pages for all 7 keys of request 0"),
    "rows": ({"block_table": torch.zeros(3, 2, dtype=torch.int32)}, ValueError, "with requests = 2"),
    "requests": ({"cu_seqlens_k": sums([7])}, ValueError, "as many entries as cu_seqlens_q = 3"),
    "integers": ({"cu_seqlens_q": torch.tensor([0.0, 3.0, 5.0])}, TypeError, "must be int32 or int64"),
    "table dtype": ({"block_table": torch.zeros(2, 2)}, TypeError, "block_table must be int32 or int64"),
    "no table": ({"block_table": None}, ValueError, "one page where there is no block_table"),
    "query": ({"query": torch.zeros(1, 5, 2, 16)}, ValueError, "shape [tokens, num_heads, head_dim]"),
    "heads": ({"query": torch.zeros(5, 3, 16)}, ValueError, "divides num_heads of query = 3"),
    "head_dim": ({"query": torch.zeros(5, 2, 8)}, ValueError, "the head_dim of query = 8"),
    "dtype": ({"query": torch.zeros(5, 2, 16).half()}, TypeError, "the dtype of query (float16)"),
    "sinks": ({"sinks": torch.zeros(3)}, ValueError, "sinks must have shape [num_heads] = [2]"),
    "scaling": ({"scaling": float("inf")}, ValueError, "scaling must be finite"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap must be finite and not negative"),
    "window": ({"sliding_window": 3, "is_causal": False}, ValueError, "sliding_window needs is_causal"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls_are_refused_alike(case: str) -> None:
    change, error, text = WRONG[case]
    arguments = make(((3, 7), (2, 2)), 2, 2, 16, 16, 4, torch.float32) | change
    for op in (paged_attention, reference):
        with pytest.raises(error) as caught:
            op(**arguments)
        found = str(caught.value).lower().replace("half", "float16")
        assert text.lower().split("(")[0] in found, op


def test_no_backward() -> None:
    arguments = make(((3, 7),), 2, 1, 16, 16, 4, torch.float32)
    arguments["query"].requires_grad_()
    with pytest.raises(RuntimeError, match="has no backward"):
        paged_attention(**arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    arguments = make(MIXED, 4, 2, 16, 24, 16, dtype) | {"sinks": torch.randn(4), "sliding_window": 9}
    torch.library.opcheck(paged_attention.default, (), arguments)


def test_compiled_whole() -> None:
    arguments = make(DECODE, 4, 2, 16, 24, 16, torch.float32)
    query = arguments.pop("query")
    compiled = torch.compile(
        lambda query: paged_attention(query, **arguments) + 1, fullgraph=True, backend="eager"
    )
    torch.testing.assert_close(compiled(query), paged_attention(query, **arguments) + 1)
