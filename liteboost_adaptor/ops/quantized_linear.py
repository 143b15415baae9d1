"""Linear layers whose weights are integers of 8 or 4 bits, and how 4 bits are packed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import DTypeError, ShapeError
from .checks import (
    check_dtype,
    check_same_device,
    check_same_dtype,
    check_same_shape,
    check_vector,
    dtype_name,
    shape_text,
)
from .registry import define

#: Columns that `pack_w4` packs together: in_features and groups are multiples of it.
PACK = 32
#: The number of the packing below. Another order of bits gets another number.
PACKING = 1


def pack_w4(integers: Tensor) -> Tensor:
    """Pack integers of 4 bits, packing 1.

    Args:
        integers: ``[out_features, in_features]``, uint8, 0 to 15; in_features a multiple of 32.

    Returns:
        ``[out_features, in_features / 2]``, uint8. 16 bytes hold 32 columns as eight little-endian words:
        nibble ``j`` of word ``i``, lowest first, is column ``8 * j + i``.
    """
    rows, columns = integers.shape
    parts = integers.reshape(rows, columns // PACK, 4, 8)
    low, high = parts[:, :, 0] | parts[:, :, 1] << 4, parts[:, :, 2] | parts[:, :, 3] << 4
    return torch.stack([low, high], dim=-1).reshape(rows, columns // 2)


def unpack_w4(packed: Tensor) -> Tensor:
    """The integers that `pack_w4` packed."""
    rows, half = packed.shape
    low, high = packed.reshape(rows, 2 * half // PACK, 8, 2).unbind(-1)
    parts = torch.stack([low & 15, low >> 4, high & 15, high >> 4], dim=2)
    return parts.reshape(rows, 2 * half)


def dequantize_w8(weight: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight that `linear_w8` multiplies by, in ``dtype``; products in fp32, or fp64 for that dtype."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (weight.to(wide) * scales.to(wide)[:, None]).to(dtype)


def dequantize_w4(
    weight: Tensor, scales: Tensor, zero_points: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The weight that `linear_w4` multiplies by, in ``dtype``; products in fp32, or fp64 for that dtype."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows, width = weight.shape[0], 2 * weight.shape[1]
    groups = unpack_w4(weight).reshape(*scales.shape, width // scales.shape[1]).to(wide)
    zeros = 8 if zero_points is None else zero_points.to(wide)[..., None]
    return ((groups - zeros) * scales.to(wide)[..., None]).reshape(rows, width).to(dtype)


def linear_w8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a linear layer whose weight is integers of 8 bits with a scale for each output.

    Args:
        x: ``[..., in_features]``, fp32/bf16/fp16 (here also fp64). Any strides.
        weight: ``[out_features, in_features]``, int8.
        scales: ``[out_features]``, fp32/bf16/fp16, whatever ``x`` is.
        bias: ``[out_features]``, dtype of ``x``, or None.

    Returns:
        ``[..., out_features]``, dtype of ``x``, contiguous.

    Raises:
        ShapeError: The shapes do not fit together.
        DTypeError: A dtype is not in the list above.
        DeviceError: The tensors are on different devices.

    Numerics:
        Integers times ``x`` summed in fp32, times the scale, plus the bias in fp32, rounded once. For more
        than 32 rows the weight is first rounded to the dtype of ``x``. On CPUs with AVX-512 BF16, bf16 values
        and partial sums below 2^-126 count as 0.

    Source:
        Dettmers et al. 2022, arXiv:2208.07339 (per-channel absmax).
    """
    op = "linear_w8"
    _check_matrix(op, x, weight, torch.int8, "[out_features, in_features]")
    _check_layer(op, x, weight, weight.shape[1], scales, bias)
    check_vector(op, "scales", scales, weight.shape[0], "out_features")
    return _product(x, dequantize_w8(weight, scales, _wide(x)), bias)


def linear_w4(
    x: Tensor, weight: Tensor, scales: Tensor, zero_points: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Apply a linear layer whose weight is integers of 4 bits with a scale for each group of columns.

    Args:
        x: ``[..., in_features]``, fp32/bf16/fp16 (here also fp64). Any strides.
        weight: ``[out_features, in_features / 2]``, uint8, as `pack_w4` packs it.
        scales: ``[out_features, groups]``, fp32/bf16/fp16, whatever ``x`` is. A group is 32 columns or
            a multiple of it.
        zero_points: Shape of ``scales``, uint8: the integers that stand for 0. None stands for 8.
        bias: ``[out_features]``, dtype of ``x``, or None.

    Returns:
        ``[..., out_features]``, dtype of ``x``, contiguous.

    Raises:
        ShapeError: The shapes do not fit together.
        DTypeError: A dtype is not in the list above.
        DeviceError: The tensors are on different devices.

    Numerics:
        Integers times ``x`` summed over a group, times its scale, summed over groups, plus the bias, all in
        fp32, rounded once. For more than 32 rows the weight is first rounded to the dtype of ``x``. On CPUs
        with AVX-512 BF16, bf16 values and partial sums below 2^-126 count as 0.

    Source:
        Frantar et al. 2022, arXiv:2210.17323 (groups); the packing is our own.
    """
    op = "linear_w4"
    _check_matrix(op, x, weight, torch.uint8, "[out_features, in_features / 2]")
    width = 2 * weight.shape[1]
    if width % PACK:
        raise ShapeError(
            f"liteboost::{op}: weight must have shape [out_features, in_features / 2] with in_features a "
            f"multiple of {PACK}, got {shape_text(weight.shape)}; keep this layer in another format"
        )
    _check_layer(op, x, weight, width, scales, bias)
    groups = scales.shape[1] if scales.dim() == 2 and scales.shape[0] == weight.shape[0] else 0
    if not groups or width % (groups * PACK):
        raise ShapeError(
            f"liteboost::{op}: scales must have shape [out_features, groups], groups of {PACK} columns or a "
            f"multiple of it, for weight {shape_text(weight.shape)}, got {shape_text(scales.shape)}; pass "
            "the scales of this layer"
        )
    if zero_points is not None:
        _check_type(op, "zero_points", zero_points, torch.uint8, "convert them")
        check_same_device(op, "zero_points", zero_points, "x", x)
        check_same_shape(op, "zero_points", zero_points, "scales", scales)
    return _product(x, dequantize_w4(weight, scales, zero_points, _wide(x)), bias)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = None if bias is None else bias.to(weight.dtype)
    return F.linear(x.to(weight.dtype), weight, wide).to(x.dtype).contiguous()


def _check_type(op: str, argument: str, tensor: Tensor, dtype: torch.dtype, advice: str) -> None:
    if tensor.dtype != dtype:
        raise DTypeError(
            f"liteboost::{op}: {argument} must be {dtype_name(dtype)}, got {dtype_name(tensor.dtype)}; "
            f"{advice}"
        )


def _check_matrix(op: str, x: Tensor, weight: Tensor, dtype: torch.dtype, shape: str) -> None:
    if x.dim() < 1:
        raise ShapeError(
            f"liteboost::{op}: x must have shape [..., in_features], got a scalar; add a dimension"
        )
    advice = "quantise it with liteboost_adaptor.quantization"
    _check_type(op, "weight", weight, dtype, advice)
    if weight.dim() != 2:
        raise ShapeError(
            f"liteboost::{op}: weight must have shape {shape}, got {shape_text(weight.shape)}; {advice}"
        )


def _check_layer(op: str, x: Tensor, weight: Tensor, width: int, scales: Tensor, bias: Tensor | None) -> None:
    check_dtype(op, "x", x)
    check_dtype(op, "scales", scales)
    check_same_device(op, "weight", weight, "x", x)
    check_same_device(op, "scales", scales, "x", x)
    if x.shape[-1] != width:
        raise ShapeError(
            f"liteboost::{op}: x must have shape [..., in_features] with in_features = {width} as weight "
            f"{shape_text(weight.shape)} has, got {shape_text(x.shape)}; pass the weight of this layer, "
            "packed for this op"
        )
    if bias is None:
        return
    check_same_dtype(op, "bias", bias, "x", x)
    check_same_device(op, "bias", bias, "x", x)
    check_vector(op, "bias", bias, weight.shape[0], "out_features")


define("linear_w8(Tensor x, Tensor weight, Tensor scales, Tensor? bias=None) -> Tensor", linear_w8)
define(
    "linear_w4(Tensor x, Tensor weight, Tensor scales, Tensor? zero_points=None, Tensor? bias=None) "
    "-> Tensor",
    linear_w4,
)
