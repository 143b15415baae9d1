"""Attention masks on an NPU: shapes its attention takes, and additive biases that are not lost.

transformers hands every float mask to the NPU's attention as a boolean one, the complement of "is not zero".
That is right for masks of zeros and smallest numbers, and loses any other bias (a learned mask, an ALiBi).
Left as it is, torch_npu adds a float mask by plain operators, and serves boolean ones by one operator.

That operator takes boolean masks as ``[B, N, Sq, Skv]``, ``[B, 1, Sq, Skv]``, ``[1, 1, Sq, Skv]`` or
``[Sq, Skv]`` only (FlashAttentionScore, ``attenMask``), where torch broadcasts any shape of two dimensions or
more.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def full_shape(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """``mask``, broadcast to a shape that NPU attention takes; itself where it has one.

    Args:
        mask: Boolean, of any shape that broadcasts to ``[B, N, Sq, Skv]``.
        query, key: ``[B, N, Sq, D]`` and ``[B, Nkv, Skv, D]``.
    """
    lengths = (query.shape[-2], key.shape[-2])
    if mask.dim() == 2 or query.dim() != 4:
        return mask if mask.shape[-2:] == lengths else mask.expand(*mask.shape[:-2], *lengths)
    if mask.dim() < 4:
        mask = mask[(None,) * (4 - mask.dim())]
    batch, heads = mask.shape[:2]
    if heads > 1:
        batch = query.shape[0]
    return mask if mask.shape == (batch, heads, *lengths) else mask.expand(batch, heads, *lengths)


def rewriting(original: Any) -> Any:
    """``scaled_dot_product_attention`` that brings boolean masks on an NPU to `full_shape`."""

    @functools.wraps(original)
    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if attn_mask is not None and attn_mask.dtype == torch.bool and query.device.type == "npu":
            attn_mask = full_shape(attn_mask, query, key)
        return original(query, key, value, attn_mask, *args, **kwargs)

    return scaled_dot_product_attention
