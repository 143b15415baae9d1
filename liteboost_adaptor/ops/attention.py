"""Scaled dot-product attention over grouped key/value heads, for prefill and decode."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import DTypeError, LiteBoostError, ShapeError
from .checks import check_dtype, check_same_device, check_same_dtype, dtype_name, shape_text
from .registry import define

# Queries handled at a time, so that memory grows with kv_len and not with q_len * kv_len.
QUERY_BLOCK = 512


class AttentionError(LiteBoostError, ValueError):
    """A number handed to attention is outside what the op is defined for."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    is_causal: bool = False,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Mix the values of each query's visible keys by the softmax of their logits.

    ``logit = softcap * tanh(scaling * q.k / softcap) + mask``, without the cap where ``softcap`` is 0. Query
    ``i`` stands at position ``i + kv_len - q_len``. A query that sees no key gives 0.

    A logit of NaN or infinity makes the rows that see it NaN; all of them -inf, like no key, give 0. Keys
    that causality or the window hides may hold anything. What ``mask`` hides has -inf added to its logit, as
    in torch's own: NaN or inf makes NaN there, too. A value that is not finite reaches the rows that see its
    key; others become NaN by it as well (0 * NaN). But the kernels leave out blocks of keys that none of
    their rows sees, whatever these hold.

    Args:
        query: ``[batch, num_heads, q_len, head_dim]``, fp32/bf16/fp16 (here also fp64). Any strides; read
            in place by the kernel where the last dimension is contiguous, copied otherwise. So are key and
            value.
        key: ``[batch, num_kv_heads, kv_len, head_dim]``; ``num_kv_heads`` divides ``num_heads``. Query head
            ``h`` reads kv head ``h // (num_heads / num_kv_heads)``; heads are not repeated in memory.
        value: ``[batch, num_kv_heads, kv_len, value_dim]``.
        mask: Broadcasts from four dimensions to ``[batch, num_heads, q_len, kv_len]``, any strides. bool:
            True where a key is visible. Otherwise added to the logits; dtype of ``query`` or fp32.
        scaling: Factor of the dot products.
        is_causal: Hide the keys after a query's position, also from a mask that shows them.
        sliding_window: Hide the keys ``sliding_window`` or more before a query's position; 0 for none. Needs
            ``is_causal``.
        softcap: Bound of the logits before the mask; 0 for none.
        sinks: ``[num_heads]`` or ``[batch, num_heads, q_len]``, dtype of ``query`` or fp32: one more logit
            of each head or query, in the denominator only.

    Returns:
        ``[batch, q_len, num_heads, value_dim]``, dtype of ``query``, contiguous.

    Raises:
        ShapeError: A shape does not fit the others.
        DTypeError: The dtypes differ, or are not in the list above.
        DeviceError: The tensors are not on one device.
        AttentionError: ``scaling`` or ``softcap`` not finite, or a window without ``is_causal``.

    Numerics:
        Softmax and both sums in fp32 (fp64 for fp64), rounded once, to ``query.dtype``. The bf16 kernel for
        AVX-512 BF16 rounds the unnormalised probabilities to bf16; the usual eager code rounds the scores and
        the normalised probabilities.

    Source:
        Vaswani et al. 2017, arXiv:1706.03762; grouped heads: Ainslie et al. 2023, arXiv:2305.13245; sinks:
        ``eager_attention_forward`` of GPT-OSS (of each query: Inkling-2) in transformers 5.23, softcap that
        of Gemma 2.
    """
    _check_attention("attention", query, key, value, mask, scaling, is_causal, sliding_window, softcap, sinks)
    batch, num_heads, q_len, _ = query.shape
    num_kv_heads, kv_len, value_dim = value.shape[1:]
    compute = torch.promote_types(query.dtype, torch.float32)
    value = value.to(compute).unsqueeze(2)  # [B, K, 1, kv_len, Dv]
    groups = num_heads // max(num_kv_heads, 1)
    if mask is not None:
        mask = mask.expand(batch, num_heads, q_len, kv_len)

    walked = isinstance(q_len, int)  # the symbolic length of a traced graph cannot be
    step = QUERY_BLOCK if walked else q_len
    outputs = []
    for start in range(0, q_len, step) if walked else (0,):
        logits = block_logits(query, key, mask, scaling, is_causal, sliding_window, softcap, start, step)
        rows = logits.shape[2]
        part = sinks if sinks is None or sinks.dim() == 1 else sinks[:, :, start : start + step]
        weights = _softmax(logits, part).reshape(batch, num_kv_heads, groups, rows, kv_len)
        mixed = (weights @ value).reshape(batch, num_heads, rows, value_dim)
        outputs.append(mixed.transpose(1, 2).to(query.dtype))
    if not outputs:
        return query.new_empty(batch, q_len, num_heads, value_dim)
    return torch.cat(outputs, dim=1).contiguous()


def block_logits(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scaling: float,
    is_causal: bool,
    sliding_window: int,
    softcap: float,
    start: int,
    step: int,
) -> Tensor:
    """``[batch, num_heads, rows, kv_len]``: logits of ``step`` queries from ``start`` on, -inf where hidden.

    Args:
        mask: Expanded to ``[batch, num_heads, q_len, kv_len]``; the others are those of `attention`.
    """
    batch, num_heads, q_len, _ = query.shape
    num_kv_heads, kv_len = key.shape[1:3]
    compute = torch.promote_types(query.dtype, torch.float32)
    key_t = key.to(compute).transpose(-1, -2).unsqueeze(2)  # [B, K, 1, D, kv_len]
    block = query[:, :, start : start + step].to(compute)
    rows = block.shape[2]
    grouped = block.reshape(batch, num_kv_heads, num_heads // max(num_kv_heads, 1), rows, block.shape[3])
    logits = (grouped @ key_t * scaling).reshape(batch, num_heads, rows, kv_len)
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is not None:
        part = mask[:, :, start : start + step]
        if part.dtype == torch.bool:
            logits = torch.where(part, logits, logits - math.inf)
        else:
            logits = logits + part.to(compute)
    if is_causal:
        hidden = _hidden(start + kv_len - q_len, rows, kv_len, sliding_window, query.device)
        logits = logits.masked_fill(hidden, -math.inf)
    return logits


def _hidden(first: int, rows: int, kv_len: int, sliding_window: int, device: torch.device) -> Tensor:
    """``[rows, kv_len]``: keys that queries at positions from ``first`` on do not see."""
    ages = first + torch.arange(rows, device=device)[:, None] - torch.arange(kv_len, device=device)
    hidden = ages < 0
    if sliding_window > 0:
        hidden = hidden | (ages >= sliding_window)
    return hidden


def _softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension with a sink's share left out; 0 where every logit is -inf."""
    if logits.shape[-1] == 0:
        return logits
    largest = logits.amax(-1, keepdim=True)
    dead = largest == -math.inf
    if sinks is not None:
        sink = sinks.to(logits.dtype)
        sink = sink[:, None, None] if sink.dim() == 1 else sink.unsqueeze(-1)
        largest = torch.maximum(largest, sink)
    weights = torch.exp(logits - largest.masked_fill(dead, 0))
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - largest)
    return weights / total.masked_fill(dead, 1)


def _check_attention(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    is_causal: bool,
    sliding_window: int,
    softcap: float,
    sinks: Tensor | None,
) -> None:
    _check_states(op, query, key, value)
    check_attention_options(op, query, key, mask, scaling, is_causal, sliding_window, softcap, sinks)


def check_attention_options(
    op: str,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scaling: float,
    is_causal: bool,
    sliding_window: int,
    softcap: float,
    sinks: Tensor | None,
) -> None:
    """Raise unless the other arguments of ``op`` fit ``query``, and what there is of ``key``."""
    wanted = (*query.shape[:3], key.shape[2])
    if mask is not None:
        if mask.dim() != 4 or any(m not in (1, w) for m, w in zip(mask.shape, wanted, strict=True)):
            raise ShapeError(
                f"liteboost::{op}: mask must broadcast to [batch, num_heads, q_len, kv_len] = "
                f"{shape_text(wanted)}, got {shape_text(mask.shape)}; give it four dimensions, cut to kv_len"
            )
        if mask.dtype not in (torch.bool, torch.float32, query.dtype):
            raise DTypeError(
                f"liteboost::{op}: mask must be bool, float32 or of the dtype of query "
                f"({dtype_name(query.dtype)}), got {dtype_name(mask.dtype)}; convert it"
            )
        check_same_device(op, "mask", mask, "query", query)
    if sinks is not None:
        fits = sinks.shape[0] == query.shape[1] if sinks.dim() == 1 else sinks.shape == query.shape[:3]
        if not fits:
            raise ShapeError(
                f"liteboost::{op}: sinks must have shape [num_heads] = [{query.shape[1]}] or "
                f"[batch, num_heads, q_len] = {shape_text(query.shape[:3])}, got {shape_text(sinks.shape)}; "
                "pass one logit for each query head, or for each of its queries"
            )
        check_same_dtype(op, "sinks", sinks, "query", query, or_float32=True)
        check_same_device(op, "sinks", sinks, "query", query)
    if not math.isfinite(scaling):
        raise AttentionError(
            f"liteboost::{op}: scaling must be finite, got {scaling}; usual is 1 / sqrt(head_dim)"
        )
    if not (math.isfinite(softcap) and softcap >= 0):
        raise AttentionError(
            f"liteboost::{op}: softcap must be finite and not negative, got {softcap}; pass 0 for none"
        )
    if sliding_window < 0:
        raise AttentionError(
            f"liteboost::{op}: sliding_window must not be negative, got {sliding_window}; pass 0 for none"
        )
    if sliding_window > 0 and not is_causal:
        raise AttentionError(
            f"liteboost::{op}: sliding_window needs is_causal = True, got sliding_window = {sliding_window} "
            "without it; put a window that looks ahead into the mask"
        )


def _check_states(op: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, states, shape in (
        ("query", query, "[batch, num_heads, q_len, head_dim]"),
        ("key", key, "[batch, num_kv_heads, kv_len, head_dim]"),
        ("value", value, "[batch, num_kv_heads, kv_len, value_dim]"),
    ):
        if states.dim() != 4:
            raise ShapeError(
                f"liteboost::{op}: {name} must have shape {shape}, got {shape_text(states.shape)}; reshape it"
            )
    check_dtype(op, "query", query)
    for name, states in (("key", key), ("value", value)):
        check_same_dtype(op, name, states, "query", query)
        check_same_device(op, name, states, "query", query)
    if key.shape[0] != query.shape[0]:
        raise ShapeError(
            f"liteboost::{op}: key must have the batch size of query = {query.shape[0]}, got {key.shape[0]}; "
            "expand or repeat one of them"
        )
    if key.shape[3] != query.shape[3]:
        raise ShapeError(
            f"liteboost::{op}: key must have the head_dim of query = {query.shape[3]}, got {key.shape[3]}; "
            "project both to one size"
        )
    check_cached_heads(op, query, key, value)


def check_cached_heads(op: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise unless ``value`` has the heads and the length of ``key``, and ``query`` their heads in groups."""
    if value.shape[:3] != key.shape[:3]:
        raise ShapeError(
            f"liteboost::{op}: value must have the batch, num_kv_heads and kv_len of key = "
            f"{shape_text(key.shape[:3])}, got {shape_text(value.shape)}; update both halves of the cache "
            "together"
        )
    heads, kv_heads = query.shape[1], key.shape[1]
    if kv_heads != heads and (kv_heads == 0 or heads % kv_heads != 0):
        raise ShapeError(
            f"liteboost::{op}: key must have a number of heads that divides num_heads of query = {heads}, "
            f"got {kv_heads}; pass the grouped heads without repeating them"
        )


define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scaling, bool is_causal=False, "
    "int sliding_window=0, float softcap=0.0, Tensor? sinks=None) -> Tensor",
    attention,
)
