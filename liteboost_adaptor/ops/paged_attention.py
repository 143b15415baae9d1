"""Attention of many requests at once, whose keys and values lie in the pages of one cache."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from ..errors import DeviceError, DTypeError, LiteBoostError, ShapeError
from .attention import AttentionError, attention
from .checks import check_dtype, check_same_device, check_same_dtype, check_vector, dtype_name, shape_text
from .registry import define

OP = "paged_attention"


class PageError(LiteBoostError, ValueError):
    """Where requests begin and end, or what pages they have, does not fit the tensors."""


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    block_table: Tensor | None,
    scaling: float,
    is_causal: bool = True,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """`attention` of each request by itself: packed queries, and keys and values wherever its pages are.

    Key ``j`` of request ``r`` lies in row ``j % page_rows`` of page ``block_table[r, j // page_rows]``. Query
    ``i`` of ``q_len`` stands at position ``i + kv_len - q_len`` of its request.

    Args:
        query: ``[tokens, num_heads, head_dim]``, the requests one after the other; fp32/bf16/fp16 (here also
            fp64). Any strides; read in place by the kernel where the last dimension is contiguous, copied
            otherwise. So are key and value.
        key: ``[pages, page_rows, num_kv_heads, head_dim]``; ``num_kv_heads`` divides ``num_heads``.
        value: ``[pages, page_rows, num_kv_heads, value_dim]``.
        cu_seqlens_q: ``[requests + 1]``, int32 or int64, on the CPU or beside ``query``: where the queries of
            each request begin and the last ones end. Begins with 0 and does not fall; a request may be empty.
        cu_seqlens_k: ``[requests + 1]``: the sums of the numbers of keys.
        block_table: ``[requests, most pages]``, int32 or int64, on the CPU or beside ``query``. What stands
            behind a request's last page is not read; requests may share pages. None: there is one page, in
            which the keys of the requests lie one after the other, as the queries do.
        scaling: Factor of the dot products.
        is_causal: Hide the keys after a query's position.
        sliding_window: Hide the keys ``sliding_window`` or more before a query's position; 0 for none. Needs
            ``is_causal``.
        softcap: Bound of the logits; 0 for none.
        sinks: ``[num_heads]``, dtype of ``query`` or fp32: one more logit, in the denominator only.

    Returns:
        ``[tokens, num_heads, value_dim]``, dtype of ``query``, contiguous; 0 for tokens of no request.

    Raises:
        ShapeError: A shape does not fit the others.
        DTypeError: The dtypes differ, or are not in the list above.
        DeviceError: The tensors are not on one device.
        PageError: ``cu_seqlens_q`` or ``cu_seqlens_k`` falls or goes beyond its tensor; a page is not in the
            cache, or a request has too few. On an NPU this is asked only of what lies on the CPU.
        AttentionError: ``scaling`` or ``softcap`` not finite, or a window without ``is_causal``.

    Numerics:
        Those of `attention`.

    Source:
        Kwon et al. 2023, arXiv:2309.06180; ``flash_attn_varlen_func`` of flash-attention.
    """
    _check(query, key, value, cu_seqlens_q, cu_seqlens_k, block_table, scaling, is_causal, softcap, sinks)
    _check_window(sliding_window, is_causal)
    result = query.new_zeros(*query.shape[:2], value.shape[3])
    if query.device.type == "meta":
        return result
    spans_q = _spans("cu_seqlens_q", cu_seqlens_q, query.shape[0], "tokens of query")
    rows = key.shape[1]
    spans_k = _spans("cu_seqlens_k", cu_seqlens_k, rows if block_table is None else None, "rows of key")
    table = None if block_table is None else _pages(block_table, key, spans_k)
    for request, (first, last) in enumerate(spans_q):
        begin, end = spans_k[request]
        if first == last:
            continue
        pages = None if table is None else table[request, : -(-(end - begin) // rows)]
        keys, values = (_states(cache, begin, end, pages) for cache in (key, value))
        one = query[first:last].transpose(0, 1).unsqueeze(0)
        mixed = attention(one, keys, values, None, scaling, is_causal, sliding_window, softcap, sinks)
        result[first:last] = mixed[0]
    return result


def _states(cache: Tensor, begin: int, end: int, pages: Tensor | None) -> Tensor:
    """A request's keys or values, ``[1, num_kv_heads, kv_len, head_dim]``: of its pages, if any."""
    if pages is None:
        own = cache[0, begin:end]
    else:
        own = cache[pages.to(cache.device, torch.int64)].flatten(0, 1)[: end - begin]
    return own.transpose(0, 1).unsqueeze(0)


def _spans(argument: str, sums: Tensor, most: int | None, what: str) -> list[tuple[int, int]]:
    """Where each request begins and ends."""
    values = sums.tolist()
    spans = list(itertools.pairwise(values))
    if values[0] != 0 or any(last < first for first, last in spans):
        raise PageError(
            f"liteboost::{OP}: {argument} must begin with 0 and not fall, got {values}; pass the sums of the "
            "lengths"
        )
    if most is not None and values[-1] > most:
        raise PageError(
            f"liteboost::{OP}: {argument} must not go beyond the {most} {what}, got {values[-1]}; pass all "
            "of them, or fewer requests"
        )
    return spans


def _pages(block_table: Tensor, key: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    """The table on the CPU, checked."""
    table, rows, columns = block_table.cpu(), key.shape[1], block_table.shape[1]
    for request, (first, last) in enumerate(spans):
        length = last - first
        if length > columns * rows:
            raise PageError(
                f"liteboost::{OP}: block_table must have pages for all {length} keys of request {request}, "
                f"got {columns} pages of {rows} rows; pass them all"
            )
        pages = table[request, : -(-length // rows) if length else 0]
        outside = pages[(pages < 0) | (pages >= key.shape[0])]
        if outside.numel():
            raise PageError(
                f"liteboost::{OP}: block_table must be 0 .. {key.shape[0] - 1}, below the pages of key, got "
                f"{outside[0].item()} in row {request}; pass numbers of pages"
            )
    return table


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    block_table: Tensor | None,
    scaling: float,
    is_causal: bool,
    softcap: float,
    sinks: Tensor | None,
) -> None:
    _check_states(query, key, value)
    for name, sums in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if sums.dim() != 1 or not sums.shape[0]:
            raise ShapeError(
                f"liteboost::{OP}: {name} must have shape [requests + 1], got {shape_text(sums.shape)}; pass "
                "where each request begins, and where the last one ends"
            )
        _check_integers(name, sums, query)
    requests = cu_seqlens_q.shape[0] - 1
    if cu_seqlens_k.shape[0] != requests + 1:
        raise ShapeError(
            f"liteboost::{OP}: cu_seqlens_k must have as many entries as cu_seqlens_q = {requests + 1}, got "
            f"{cu_seqlens_k.shape[0]}; pass both of the same requests"
        )
    if block_table is None:
        if key.shape[0] != 1:
            raise ShapeError(
                f"liteboost::{OP}: key must have one page where there is no block_table, got {key.shape[0]}; "
                "pass the table"
            )
    else:
        if block_table.dim() != 2 or block_table.shape[0] != requests:
            raise ShapeError(
                f"liteboost::{OP}: block_table must have shape [requests, most pages] with requests = "
                f"{requests}, got {shape_text(block_table.shape)}; pass a row for each request"
            )
        _check_integers("block_table", block_table, query)
    if sinks is not None:
        check_vector(OP, "sinks", sinks, query.shape[1], "num_heads")
        check_same_dtype(OP, "sinks", sinks, "query", query, or_float32=True)
        check_same_device(OP, "sinks", sinks, "query", query)
    if not math.isfinite(scaling):
        raise AttentionError(
            f"liteboost::{OP}: scaling must be finite, got {scaling}; usual is 1 / sqrt(head_dim)"
        )
    if not (math.isfinite(softcap) and softcap >= 0):
        raise AttentionError(
            f"liteboost::{OP}: softcap must be finite and not negative, got {softcap}; pass 0 for none"
        )


def _check_window(sliding_window: int, is_causal: bool) -> None:
    if sliding_window < 0:
        raise AttentionError(
            f"liteboost::{OP}: sliding_window must not be negative, got {sliding_window}; pass 0 for none"
        )
    if sliding_window > 0 and not is_causal:
        raise AttentionError(
            f"liteboost::{OP}: sliding_window needs is_causal = True, got sliding_window = {sliding_window} "
            "without it; pass 0 for none"
        )


def _check_integers(name: str, tensor: Tensor, query: Tensor) -> None:
    if tensor.dtype not in (torch.int32, torch.int64):
        raise DTypeError(
            f"liteboost::{OP}: {name} must be int32 or int64, got {dtype_name(tensor.dtype)}; convert it"
        )
    if tensor.device.type != "cpu" and tensor.device != query.device:
        raise DeviceError(
            f"liteboost::{OP}: {name} must be on the CPU or on the device of query ({query.device}), got "
            f"{tensor.device}; move it"
        )


def _check_states(query: Tensor, key: Tensor, value: Tensor) -> None:
    if query.dim() != 3:
        raise ShapeError(
            f"liteboost::{OP}: query must have shape [tokens, num_heads, head_dim], got "
            f"{shape_text(query.shape)}; put the requests one after the other"
        )
    for name, states, size in (("key", key, "head_dim"), ("value", value, "value_dim")):
        if states.dim() != 4:
            raise ShapeError(
                f"liteboost::{OP}: {name} must have shape [pages, page_rows, num_kv_heads, {size}], got "
                f"{shape_text(states.shape)}; view the cache so"
            )
    check_dtype(OP, "query", query)
    for name, states in (("key", key), ("value", value)):
        check_same_dtype(OP, name, states, "query", query)
        check_same_device(OP, name, states, "query", query)
    if key.shape[3] != query.shape[2]:
        raise ShapeError(
            f"liteboost::{OP}: key must have the head_dim of query = {query.shape[2]}, got {key.shape[3]}; "
            "project both to one size"
        )
    if value.shape[:3] != key.shape[:3]:
        raise ShapeError(
            f"liteboost::{OP}: value must have the pages, page_rows and num_kv_heads of key "
            f"{shape_text(key.shape)}, got {shape_text(value.shape)}; pass the two halves of one cache"
        )
    heads, kv_heads = query.shape[1], key.shape[2]
    if kv_heads != heads and (kv_heads == 0 or heads % kv_heads != 0):
        raise ShapeError(
            f"liteboost::{OP}: key must have a number of heads that divides num_heads of query = {heads}, "
            f"got {kv_heads}; pass the grouped heads without repeating them"
        )


define(
    "paged_attention(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "Tensor? block_table, float scaling, bool is_causal=True, int sliding_window=0, float softcap=0.0, "
    "Tensor? sinks=None) -> Tensor",
    paged_attention,
)
