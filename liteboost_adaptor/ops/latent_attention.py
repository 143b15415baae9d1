"""Attention of one query a row to a compressed cache (MLA), for an NPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import attention
from .registry import define_for_npu


def latent_attention(
    query: Tensor, query_rope: Tensor, latent: Tensor, key_rope: Tensor, scaling: float
) -> Tensor:
    """`attention` of one query a row to keys in two parts, of which the first is the values, too.

    Args:
        query: ``[batch, num_heads, 1, rank]``, fp32/bf16/fp16 (here also fp64): queries that the key half of
            ``kv_b_proj`` was absorbed into.
        query_rope: ``[batch, num_heads, 1, rope_dim]``.
        latent: ``[batch, 1, kv_len, rank]``.
        key_rope: ``[batch, 1, kv_len, rope_dim]``.
        scaling: Factor of the dot products.

    Returns:
        ``[batch, 1, num_heads, rank]``, dtype of ``query``, contiguous.

    Numerics:
        As `attention`.

    Source:
        DeepSeek-AI 2024, arXiv:2405.04434; ``queryRope`` and ``keyRope`` of FusedInferAttentionScore.
    """
    whole = torch.cat([query, query_rope], -1), torch.cat([latent, key_rope], -1)
    return attention(*whole, latent, None, scaling)


define_for_npu(
    "_npu_latent_attention(Tensor query, Tensor query_rope, Tensor latent, Tensor key_rope, float scaling) "
    "-> Tensor",
    latent_attention,
)
