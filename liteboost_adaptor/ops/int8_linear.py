"""Linear layers with weights of 8 bits, whose activations are rounded to 8 bits on the way in."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import DTypeError, ShapeError
from .checks import (
    check_dtype,
    check_same_device,
    check_same_dtype,
    check_vector,
    dtype_name,
    shape_text,
)
from .registry import define

#: So many products of 127 by 128 fit 32 bits.
COLUMNS = 131072
#: What the largest magnitude of a row counts as at least.
_LEAST = 2.0**-100


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row of ``x`` to integers, as `linear_w8a8` does it.

    Args:
        x: ``[..., columns]``, floating point.

    Returns:
        Integers of -127 to 127 ``[..., columns]``, int8, and what they are multiples of ``[..., 1]``, fp32:
        NaN, with integers of 0, for a row that holds NaN or infinity.
    """
    exact = x.float()
    if not exact.shape[-1]:
        return exact.to(torch.int8), exact.new_ones((*exact.shape[:-1], 1))
    largest = exact.abs().amax(dim=-1, keepdim=True)
    is_finite = largest.isfinite()  # a NaN is the largest
    largest = torch.where(is_finite, largest, 1.0).clamp(min=_LEAST)
    factors = torch.full_like(largest, 127.0) / largest  # 127.0 / largest is 127 times its rounded reciprocal
    integers = (torch.where(is_finite, exact, 0.0) * factors).round()
    return integers.to(torch.int8), torch.where(is_finite, largest / 127.0, torch.nan)


def linear_w8a8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a linear layer to rows of integers of 8 bits, with integers of 8 bits.

    Args:
        x: ``[..., in_features]``, fp32/bf16/fp16. Any strides.
        weight: ``[out_features, in_features]``, int8; in_features at most 131072.
        scales: ``[out_features]``, fp32/bf16/fp16, whatever ``x`` is.
        bias: ``[out_features]``, dtype of ``x``, or None.

    Returns:
        ``[..., out_features]``, dtype of ``x``, contiguous.

    Raises:
        ShapeError: The shapes do not fit together, or in_features is too large.
        DTypeError: A dtype is not in the list above.
        DeviceError: The tensors are on different devices.

    Numerics:
        Each row of ``x`` is divided by its largest magnitude over 127 (`quantize_rows`) and rounded to
        nearest even. Sums of products of integers are exact; then fp32: rounded, times the output's scale,
        times the row's, plus the bias, rounded once more to the dtype. The same bits on every instruction set
        and for every number of rows. A row with NaN or infinity gives NaN.

    Source:
        Dettmers et al. 2022, arXiv:2208.07339 (per-row and per-column absmax).
    """
    _check(x, weight, scales, bias)
    integers, row_scales = quantize_rows(x)
    # In fp64 the sums are exact, and one matrix product on every device.
    sums = integers.double() @ weight.double().t()
    result = sums.float() * scales.float() * row_scales
    if bias is not None:
        result = result + bias.float()
    return result.to(x.dtype).contiguous()


def _check(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
    op, advice = "linear_w8a8", "quantize it with liteboost_adaptor.quantization"
    if x.dim() < 1:
        raise ShapeError(
            f"liteboost::{op}: x must have shape [..., in_features], got a scalar; add a dimension"
        )
    if weight.dtype != torch.int8:
        raise DTypeError(f"liteboost::{op}: weight must be int8, got {dtype_name(weight.dtype)}; {advice}")
    if weight.dim() != 2:
        raise ShapeError(
            f"liteboost::{op}: weight must have shape [out_features, in_features], got "
            f"{shape_text(weight.shape)}; {advice}"
        )
    check_dtype(op, "x", x)
    check_dtype(op, "scales", scales)
    check_same_device(op, "weight", weight, "x", x)
    check_same_device(op, "scales", scales, "x", x)
    if x.shape[-1] != weight.shape[1]:
        raise ShapeError(
            f"liteboost::{op}: x must have shape [..., in_features] with in_features = {weight.shape[1]} as "
            f"weight {shape_text(weight.shape)} has, got {shape_text(x.shape)}; pass the weight of this layer"
        )
    if weight.shape[1] > COLUMNS:
        raise ShapeError(
            f"liteboost::{op}: weight must have at most {COLUMNS} columns, whose products fit 32 bits, got "
            f"{shape_text(weight.shape)}; keep this layer in another format"
        )
    check_vector(op, "scales", scales, weight.shape[0], "out_features")
    if bias is not None:
        check_same_dtype(op, "bias", bias, "x", x)
        check_same_device(op, "bias", bias, "x", x)
        check_vector(op, "bias", bias, weight.shape[0], "out_features")


define("linear_w8a8(Tensor x, Tensor weight, Tensor scales, Tensor? bias=None) -> Tensor", linear_w8a8)
