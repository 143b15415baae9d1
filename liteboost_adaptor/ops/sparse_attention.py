"""Attention in which each block of queries reads chosen blocks of keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import DTypeError, LiteBoostError, ShapeError
from .attention import AttentionError, _check_states, _softmax
from .checks import check_same_device, dtype_name, shape_text
from .registry import define

MOST = 2**31 - 1


class SelectionError(LiteBoostError, IndexError):
    """Lists that name no blocks, or not in order."""


def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    select_idx: Tensor,
    select_num_idx: Tensor,
    block_shape: list[int],
    scaling: float,
    is_causal: bool = False,
) -> Tensor:
    """Mix, for each block of queries, the values of the blocks of keys that were chosen for it.

    As `attention` with a mask that hides all other keys; they are not read. A query that sees no key gives 0.

    Args:
        query: ``[batch, num_heads, q_len, head_dim]``, fp32/bf16/fp16 (here also fp64). Any strides; read
            in place by the kernel where the last dimension is contiguous, copied otherwise. So are key and
            value.
        key: ``[batch, num_kv_heads, kv_len, head_dim]``; ``num_kv_heads`` divides ``num_heads``. Query head
            ``h`` reads kv head ``h // (num_heads / num_kv_heads)``; heads are not repeated in memory.
        value: ``[batch, num_kv_heads, kv_len, value_dim]``.
        select_idx: ``[batch * query_blocks, heads, most]`` int64, with ``query_blocks = ceil(q_len /
            block_shape[0])``, those of a sequence after those of the one before: numbers of blocks of keys,
            ascending, each once; behind the first ``select_num_idx`` of them -1. ``heads`` is
            ``num_heads``, or ``num_kv_heads`` where the query heads of a group share a choice.
        select_num_idx: ``[batch * query_blocks, heads]`` int64: how many of each list count.
        block_shape: Queries and keys in a block; the last block of each may be shorter.
        scaling: Factor of the dot products.
        is_causal: Hide the keys after a query's position, which is ``i + kv_len - q_len`` for query ``i``,
            inside the chosen blocks, too.

    Returns:
        ``[batch, q_len, num_heads, value_dim]``, dtype of ``query``, contiguous.

    Raises:
        ShapeError: A shape does not fit the others.
        DTypeError: The dtypes differ, or are not in the list above.
        DeviceError: The tensors are not on one device.
        AttentionError: ``scaling`` is not finite, or ``block_shape`` not two positive numbers.
        SelectionError: A list is not ascending, or names a block that is not there. Looked at only on a CPU:
            elsewhere the numbers would have to be waited for.

    Numerics:
        As `attention`: softmax and both sums in fp32 (fp64 for fp64), rounded once, to ``query.dtype``. The
        bf16 kernel for AVX-512 BF16 rounds the unnormalised probabilities to bf16.

    Source:
        The contract of CANN's ``aclnnRainFusionAttention`` (its documentation in ops-transformer), and
        causality with it; block-sparse attention: Child et al. 2019, arXiv:1904.10509; blocks chosen for each
        prompt: Jiang et al. 2024, arXiv:2407.02490.
    """
    _check(query, key, value, select_idx, select_num_idx, block_shape, scaling)
    batch, num_heads, q_len, _ = query.shape
    num_kv_heads, kv_len, value_dim = value.shape[1:]
    heads, most = select_idx.shape[1:]
    if 0 in (batch, num_heads, q_len, kv_len, value_dim, most):
        return query.new_zeros(batch, q_len, num_heads, value_dim)
    compute = torch.promote_types(query.dtype, torch.float32)
    blocks = select_idx.reshape(batch, -1, heads, most)
    counts = select_num_idx.reshape(batch, -1, heads, 1)
    offsets = torch.arange(block_shape[1], device=query.device)
    slots = torch.arange(most, device=query.device)
    outputs = []
    for i, start in enumerate(range(0, q_len, block_shape[0])):
        rows = query[:, :, start : start + block_shape[0]].to(compute)
        length = rows.shape[2]
        rows = rows.reshape(batch, heads, num_heads // heads * length, rows.shape[3])
        counted = (slots < counts[:, i]).unsqueeze(-1)  # [B, heads, most, 1]
        positions = blocks[:, i].unsqueeze(-1) * block_shape[1] + offsets
        seen = (counted & (positions >= 0) & (positions < kv_len)).flatten(2)
        positions = positions.flatten(2)  # [B, heads, keys]
        keys, values = (
            _gathered(states, positions.clamp(0, kv_len - 1), num_kv_heads).to(compute)
            for states in (key, value)
        )
        logits = (rows @ keys.transpose(-1, -2) * scaling).unflatten(2, (-1, length))
        at = start + kv_len - q_len if is_causal else None
        mixed = _mixed(logits, values, seen, positions, at).reshape(batch, num_heads, length, value_dim)
        outputs.append(mixed.transpose(1, 2).to(query.dtype))
    return torch.cat(outputs, dim=1).contiguous()


def _mixed(logits: Tensor, values: Tensor, seen: Tensor, positions: Tensor, at: int | None) -> Tensor:
    """Values by the softmax of the logits of the keys seen; ``at``: where the first query is, if causal."""
    hidden = ~seen[:, :, None, None]
    if at is not None:
        queries = at + torch.arange(logits.shape[3], device=logits.device)
        hidden = hidden | (positions[:, :, None, None] > queries[:, None])
    weights = _softmax(logits.masked_fill(hidden, -math.inf), None).flatten(2, 3)
    # What no query sees may hold anything, and 0 times that need not be 0.
    return weights @ values.masked_fill(~seen.unsqueeze(-1), 0)


def _gathered(states: Tensor, positions: Tensor, num_kv_heads: int) -> Tensor:
    """``[batch, heads, keys, dim]``: the states of kv heads at the positions of each head of a choice."""
    batch, heads, keys = positions.shape
    beside = positions.reshape(batch, num_kv_heads, heads // num_kv_heads * keys, 1)
    found = states.gather(2, beside.expand(-1, -1, -1, states.shape[3]))
    return found.reshape(batch, heads, keys, states.shape[3])


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    select_idx: Tensor,
    select_num_idx: Tensor,
    block_shape: list[int],
    scaling: float,
) -> None:
    op = "block_sparse_attention"
    _check_states(op, query, key, value)
    if len(block_shape) != 2 or not all(0 < block <= MOST for block in block_shape):
        raise AttentionError(
            f"liteboost::{op}: block_shape must be two numbers from 1 to {MOST}, of queries and of keys, "
            f"got {shape_text(block_shape)}; usual is [128, 128]"
        )
    rows = query.shape[0] * -(-query.shape[2] // block_shape[0])
    heads = (query.shape[1], key.shape[1])
    if select_idx.dim() != 3 or select_idx.shape[0] != rows or select_idx.shape[1] not in heads:
        raise ShapeError(
            f"liteboost::{op}: select_idx must have shape [batch * query blocks, num_heads or num_kv_heads, "
            f"key blocks] = [{rows}, {heads[0]} or {heads[1]}, any], got {shape_text(select_idx.shape)}; "
            "pass a list for each block of queries and head"
        )
    if select_num_idx.shape != select_idx.shape[:2]:
        raise ShapeError(
            f"liteboost::{op}: select_num_idx must have the first two sizes of select_idx = "
            f"{shape_text(select_idx.shape[:2])}, got {shape_text(select_num_idx.shape)}; pass how many of "
            "each list count"
        )
    for name, table in (("select_idx", select_idx), ("select_num_idx", select_num_idx)):
        if table.dtype != torch.int64:
            raise DTypeError(
                f"liteboost::{op}: {name} must be int64, got {dtype_name(table.dtype)}; convert it"
            )
        check_same_device(op, name, table, "query", query)
    if not math.isfinite(scaling):
        raise AttentionError(
            f"liteboost::{op}: scaling must be finite, got {scaling}; usual is 1 / sqrt(head_dim)"
        )
    if select_idx.is_cpu:
        _check_selection(select_idx, select_num_idx, -(-key.shape[2] // block_shape[1]))


def _check_selection(select_idx: Tensor, select_num_idx: Tensor, key_blocks: int) -> None:
    op = "block_sparse_attention"
    most = select_idx.shape[2]
    if ((select_num_idx < 0) | (select_num_idx > most)).any():
        raise SelectionError(
            f"liteboost::{op}: select_num_idx must be 0 .. {most}, the length of the lists, got "
            f"{select_num_idx.min()} .. {select_num_idx.max()}; pass longer lists"
        )
    counted = torch.arange(most) < select_num_idx.unsqueeze(-1)
    before = torch.cat([torch.full_like(select_idx[..., :1], -1), select_idx[..., :-1]], dim=-1)
    wrong = counted & ((select_idx <= before[..., :most]) | (select_idx >= key_blocks))
    if wrong.any():
        raise SelectionError(
            f"liteboost::{op}: select_idx must be ascending, 0 .. {key_blocks - 1}, below the blocks of "
            f"keys, got {select_idx[wrong][0]} behind {before[..., :most][wrong][0]}; sort each list and "
            "take every block once"
        )


define(
    "block_sparse_attention(Tensor query, Tensor key, Tensor value, Tensor select_idx, "
    "Tensor select_num_idx, int[] block_shape, float scaling, bool is_causal=False) -> Tensor",
    block_sparse_attention,
)
