"""Attention of one query a row whose logits are capped, for recorded steps on an NPU."""

from __future__ import annotations

from torch import Tensor

from .attention import attention
from .registry import define_for_npu


def softcap_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float
) -> Tensor:
    """`attention` of one query a row, of which no mask hides every key: ``mask`` has no infinities.

    Args:
        query: ``[batch, num_heads, 1, head_dim]``, fp32/bf16/fp16 (here also fp64).
        key: ``[batch, num_kv_heads, kv_len, head_dim]``.
        value: ``[batch, num_kv_heads, kv_len, value_dim]``.
        mask: Added to the capped logits, ``[batch or 1, 1, 1, kv_len]``, dtype of ``query``; or None.
        scaling: Factor of the dot products.
        softcap: Bound of the logits, above 0.

    Returns:
        ``[batch, 1, num_heads, value_dim]``, dtype of ``query``.

    Numerics:
        On an NPU each of the six operators rounds to the dtype, as each step of the original code does.

    Source:
        ``eager_attention_forward`` of Gemma 2 in transformers 5.23.
    """
    return attention(query, key, value, mask, scaling, softcap=softcap)


define_for_npu(
    "_npu_softcap_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scaling, "
    "float softcap) -> Tensor",
    softcap_attention,
)
