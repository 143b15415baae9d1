"""Attention over some of the keys that a query sees, with what it takes to put the parts together."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .attention import QUERY_BLOCK, _check_attention, _softmax, block_logits
from .registry import define


def attention_part(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    is_causal: bool = False,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """As `attention`, and beside it the logarithm of the sum that the softmax divided by.

    Of several parts of the keys ``sum_i(exp(lse_i - lse) * output_i)`` is the output over all of them, where
    ``lse`` is the logarithm of the sum of ``exp(lse_i)``; `joined` computes it.

    Args:
        query: As for `attention`, and so are the others.
        key: Some of the keys.
        value: The values of the same.
        mask: The columns of the same, broadcast as for `attention`.
        scaling: Factor of the dot products.
        is_causal: Hide the keys after a query's position, where query ``i`` stands at ``i + kv_len - q_len``.
        softcap: Bound of the logits before the mask; 0 for none.

    Returns:
        The output, ``[batch, q_len, num_heads, value_dim]``, and ``lse``, ``[batch, q_len, num_heads]``, both
        fp32 (fp64 for fp64). A query that sees no key gives 0 and -inf.

    Raises:
        ShapeError, DTypeError, DeviceError, AttentionError: As `attention`.

    Numerics:
        As `attention`, but the output is not rounded to ``query.dtype``, unless by an operator of an NPU.

    Source:
        Milakov & Gimelshein 2018, arXiv:1805.02867; parts on several processes: Liu et al. 2023,
        arXiv:2310.01889.
    """
    _check_attention("attention_part", query, key, value, mask, scaling, is_causal, 0, softcap, None)
    batch, num_heads, q_len, _ = query.shape
    num_kv_heads, kv_len, value_dim = value.shape[1:]
    compute = torch.promote_types(query.dtype, torch.float32)
    if mask is not None:
        mask = mask.expand(batch, num_heads, q_len, kv_len)
    output = torch.zeros(batch, q_len, num_heads, value_dim, dtype=compute, device=query.device)
    lse = torch.full((batch, q_len, num_heads), -math.inf, dtype=compute, device=query.device)
    if not (kv_len and lse.numel()):
        return output, lse
    wide = value.to(compute).repeat_interleave(num_heads // num_kv_heads, 1)
    # A symbolic length cannot be walked while a graph is traced.
    walked = isinstance(q_len, int)
    step = QUERY_BLOCK if walked else q_len
    for start in range(0, q_len, step) if walked else (0,):
        logits = block_logits(query, key, mask, scaling, is_causal, 0, softcap, start, step)
        # Not exp(logits - lse), which loses the number of keys where a mask is as low as its dtype goes.
        output[:, start : start + step] = (_softmax(logits, None) @ wide).transpose(1, 2)
        lse[:, start : start + step] = torch.logsumexp(logits, -1).transpose(1, 2)
    return output, lse


def joined(output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """What `attention_part` gives over two parts of the keys together, of what it gives over each.

    Args:
        output, other: ``[batch, q_len, num_heads, value_dim]``.
        lse, other_lse: ``[batch, q_len, num_heads]``.
    """
    both = torch.logaddexp(lse, other_lse)
    # Where no key is seen, -inf - -inf is no number.
    safe = both.masked_fill(both == -math.inf, 0)
    mixed = output * torch.exp(lse - safe).unsqueeze(-1)
    return mixed.addcmul_(other, torch.exp(other_lse - safe).unsqueeze(-1)), both


def with_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """``output`` where ``sinks`` join the sum that it was divided by.

    Args:
        output, lse: Over all keys, as `attention_part` gives them.
        sinks: As of `attention`: ``[num_heads]``, or ``[batch, num_heads, q_len]``.
    """
    sink = sinks.to(lse.dtype) if sinks.dim() == 1 else sinks.to(lse.dtype).transpose(1, 2)
    return output * torch.sigmoid(lse - sink).unsqueeze(-1)


define(
    "attention_part(Tensor query, Tensor key, Tensor value, Tensor? mask, float scaling, "
    "bool is_causal=False, float softcap=0.0) -> (Tensor, Tensor)",
    attention_part,
)
