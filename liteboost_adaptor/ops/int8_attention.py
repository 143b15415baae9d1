"""Attention over keys and values kept as integers of 8 bits, and how they become such."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import DTypeError, ShapeError
from .attention import attention, check_attention_options, check_cached_heads
from .checks import check_dtype, check_same_device, dtype_name, shape_text
from .int8_linear import quantize_rows
from .registry import define

#: Bytes of the float behind the integers of a row.
SCALE_BYTES = 4


def quantize_kv(x: Tensor) -> Tensor:
    """Keep each row of ``x`` as integers of 8 bits and, behind them, what they are multiples of.

    Args:
        x: ``[..., head_dim]``, fp32/bf16/fp16. Any strides.

    Returns:
        ``[..., head_dim + 4]``, int8, contiguous: the integers, and the four bytes of their scale, an fp32 at
        any alignment.

    Raises:
        ShapeError: ``x`` has no dimension.
        DTypeError: A dtype that is not in the list above.

    Numerics:
        The scale is the largest magnitude of a row (at least 2**-100) over 127; values times 127 over that
        magnitude are rounded to nearest even, all in fp32, as `linear_w8a8` rounds its inputs. A value is off
        by at most half a scale. A row with NaN or infinity has a scale of NaN and is NaN throughout. The same
        bits on every instruction set.

    Source:
        Dettmers et al. 2022, arXiv:2208.07339 (per-row absmax).
    """
    if x.dim() < 1:
        raise ShapeError(
            "liteboost::quantize_kv: x must have shape [..., head_dim], got a scalar; add a dimension"
        )
    check_dtype("quantize_kv", "x", x)
    integers, scales = quantize_rows(x)
    if not x.shape[-1]:
        scales = torch.full_like(scales, 2.0**-100 / 127)
    # A copy: what is contiguous may have any strides where there is one element, or none.
    scales = scales.new_empty(scales.shape).copy_(scales)
    return torch.cat([integers, scales.view(torch.int8)], dim=-1)


def dequantized(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The values that ``rows`` of `quantize_kv` stand for, dequantized in fp32 (fp64 for fp64) and rounded.

    Args:
        rows: ``[..., head_dim + 4]``, int8.
        dtype: Of the result ``[..., head_dim]``.
    """
    # A copy: one row that is contiguous may lie at any address, and a view of floats may not.
    scales = rows[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    compute = torch.promote_types(dtype, torch.float32)
    return (rows[..., :-SCALE_BYTES].to(compute) * scales.to(compute)).to(dtype)


def int8_attention(
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
    """`attention` over keys and values that are rows of `quantize_kv`, none of them dequantized in memory.

    Args:
        query: ``[batch, num_heads, q_len, head_dim]``, fp32/bf16/fp16 (here also fp64). Any strides; read
            in place by the kernel where the last dimension is contiguous, copied otherwise. So are key and
            value.
        key: ``[batch, num_kv_heads, kv_len, head_dim + 4]``, int8.
        value: ``[batch, num_kv_heads, kv_len, value_dim + 4]``, int8.
        mask: As of `attention`.
        scaling: Factor of the dot products.
        is_causal: Hide the keys after a query's position, also from a mask that shows them.
        sliding_window: Hide the keys ``sliding_window`` or more before a query's position; 0 for none. Needs
            ``is_causal``.
        softcap: Bound of the logits before the mask; 0 for none.
        sinks: As of `attention`.

    Returns:
        ``[batch, q_len, num_heads, value_dim]``, dtype of ``query``, contiguous.

    Raises:
        ShapeError: A shape does not fit the others.
        DTypeError: Keys or values that are not int8, or a dtype not served.
        DeviceError: The tensors are not on one device.
        AttentionError: ``scaling`` or ``softcap`` not finite, or a window without ``is_causal``.

    Numerics:
        Of `attention` over the exactly dequantized values. The bf16 kernel for AVX-512 BF16 rounds the
        unnormalised probabilities times the scales of their values to bf16; for few queries, to 24 bits of
        the largest of 128 keys, and queries to 16 bits of the largest magnitude of each.

    Source:
        `attention`; a scale for each token and head of the cache: Sheng et al. 2023, arXiv:2303.06865.
    """
    _check(query, key, value)
    check_attention_options(
        "int8_attention", query, key, mask, scaling, is_causal, sliding_window, softcap, sinks
    )
    compute = torch.promote_types(query.dtype, torch.float32)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(compute)
    keys, values = (dequantized(rows, compute) for rows in (key, value))
    sinks = None if sinks is None else sinks.to(compute)
    result = attention(
        query.to(compute), keys, values, mask, scaling, is_causal, sliding_window, softcap, sinks
    )
    return result.to(query.dtype)


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    op, advice = "int8_attention", "make it with quantize_kv"
    if query.dim() != 4:
        raise ShapeError(
            f"liteboost::{op}: query must have shape [batch, num_heads, q_len, head_dim], got "
            f"{shape_text(query.shape)}; reshape it"
        )
    for name, rows, size in (("key", key, "head_dim"), ("value", value, "value_dim")):
        if rows.dim() != 4:
            raise ShapeError(
                f"liteboost::{op}: {name} must have shape [batch, num_kv_heads, kv_len, {size} + "
                f"{SCALE_BYTES}], got {shape_text(rows.shape)}; {advice}"
            )
    check_dtype(op, "query", query)
    for name, rows in (("key", key), ("value", value)):
        if rows.dtype != torch.int8:
            raise DTypeError(
                f"liteboost::{op}: {name} must be int8, got {dtype_name(rows.dtype)}; make rows of integers "
                "with quantize_kv"
            )
    for name, rows in (("key", key), ("value", value)):
        check_same_device(op, name, rows, "query", query)
    if key.shape[0] != query.shape[0]:
        raise ShapeError(
            f"liteboost::{op}: key must have the batch size of query = {query.shape[0]}, got {key.shape[0]}; "
            "expand or repeat one of them"
        )
    if key.shape[3] != query.shape[3] + SCALE_BYTES:
        raise ShapeError(
            f"liteboost::{op}: key must have rows of head_dim + {SCALE_BYTES} with the head_dim of query = "
            f"{query.shape[3]}, got {key.shape[3]}; {advice}"
        )
    if value.shape[3] < SCALE_BYTES:
        raise ShapeError(
            f"liteboost::{op}: value must have rows of value_dim + {SCALE_BYTES}, got {value.shape[3]}; "
            f"{advice}"
        )
    check_cached_heads(op, query, key, value)


define("quantize_kv(Tensor x) -> Tensor", quantize_kv)
define(
    "int8_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scaling, "
    "bool is_causal=False, int sliding_window=0, float softcap=0.0, Tensor? sinks=None) -> Tensor",
    int8_attention,
)
