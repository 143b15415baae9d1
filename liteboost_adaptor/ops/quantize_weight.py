"""Weights rounded to integers of 8 or 4 bits, by the scales of least squared error among a few."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import DTypeError, ShapeError
from .checks import check_dtype, dtype_name, shape_text
from .quantized_linear import PACK, pack_w4
from .registry import define

#: Where the largest magnitude of a group may come to lie, in integers. Less than the end of the range keeps
#: all of it; more clips the largest weights, so that the others are rounded finer.
W4_ENDS = (7.0, 7.5, 8.0, 8.5, 9.0)
W8_ENDS = (127.0, 130.0, 134.0)
#: How much of the range of a group an asymmetric scale covers.
W4_SHARES = (1.0, 0.95, 0.9, 0.85)
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quantize_w8(weight: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round a weight to integers of 8 bits with a scale for each output.

    Args:
        weight: ``[out_features, in_features]``, fp32/bf16/fp16 (here also fp64). Any strides.
        scale_dtype: fp32/bf16/fp16.

    Returns:
        Integers of -127 to 127 ``[out_features, in_features]``, int8, and scales ``[out_features]``, which
        are NaN, with integers of 0, for outputs with NaN or infinity and where no scale is finite.

    Raises:
        ShapeError: The weight is no matrix.
        DTypeError: A dtype is not in the list above.

    Numerics:
        Weights are divided and rounded in fp32, ties to even; errors are summed in fp64.

    Source:
        Of the candidates our own; the fit of a scale to its integers is least squares.
    """
    _check("quantize_w8", weight, scale_dtype)
    groups = weight.float()[:, None]
    scales, zeros = fit_scales(groups, 8, True, scale_dtype)
    integers = round_to_integers(groups, scales, zeros, 8, True)
    return integers[:, 0].to(torch.int8), scales[:, 0].to(scale_dtype)


def quantize_w4(
    weight: Tensor, group_size: int, symmetric: bool, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Round a weight to integers of 4 bits with a scale, and a zero point, for each group of columns.

    Args:
        weight: ``[out_features, in_features]``, fp32/bf16/fp16 (here also fp64). Any strides.
        group_size: Columns that share a scale: a multiple of 32 that divides in_features.
        symmetric: Whether 8 stands for zero in every group.
        scale_dtype: fp32/bf16/fp16.

    Returns:
        The integers, uint8 ``[out_features, in_features / 2]`` as `pack_w4` packs them; scales
        ``[out_features, groups]``, which are NaN, with integers that stand for zero, as of `quantize_w8`; and
        the integers that stand for zero, uint8, like the scales.

    Raises:
        ShapeError: The weight is no matrix, or the groups do not divide it.
        DTypeError: A dtype is not in the list above.

    Numerics:
        As of `quantize_w8`.

    Source:
        Frantar et al. 2022, arXiv:2210.17323 (groups); the candidates are our own.
    """
    _check("quantize_w4", weight, scale_dtype)
    if group_size <= 0 or group_size % PACK:
        raise ShapeError(
            f"liteboost::quantize_w4: group_size must be a multiple of {PACK}, got {group_size}; 32, 64 and "
            "128 are usual"
        )
    if weight.shape[1] % group_size:
        raise ShapeError(
            "liteboost::quantize_w4: weight must have a multiple of group_size columns, got "
            f"{shape_text(weight.shape)} and groups of {group_size}; choose smaller groups, or keep this "
            "layer in another format"
        )
    groups = weight.float().reshape(len(weight), weight.shape[1] // group_size, group_size)
    scales, zeros = fit_scales(groups, 4, symmetric, scale_dtype)
    integers = round_to_integers(groups, scales, zeros, 4, symmetric)
    if symmetric:
        integers, zeros = integers + 8, zeros + 8
    packed = pack_w4(integers.reshape(weight.shape).to(torch.uint8))
    return packed, scales.to(scale_dtype), zeros.to(torch.uint8)


def fit_scales(groups: Tensor, bits: int, symmetric: bool, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales and zero points of least squared error.

    Args:
        groups: ``[out_features, groups, columns]``, fp32.
        bits: 8 or 4.
        symmetric: Whether 0 stands for zero.
        scale_dtype: What scales are rounded to.

    Returns:
        Scales, fp32, and zero points, fp32 (0 if symmetric), ``[out_features, groups]``; 1 and 8 of zeros. A
        scale is NaN where a weight is NaN or infinite, or where no scale is finite.
    """
    if bits == 8:
        return _best(groups, W8_ENDS, _symmetric(-127, 127), scale_dtype)
    if symmetric:
        return _best(groups, W4_ENDS, _symmetric(-8, 7), scale_dtype)
    return _best(groups, W4_SHARES, _asymmetric, scale_dtype, 8)


def round_to_integers(groups: Tensor, scales: Tensor, zeros: Tensor, bits: int, symmetric: bool) -> Tensor:
    """Integers, in fp32, of which ``(integer - zero) * scale`` is nearest to ``[out, groups, columns]``.

    Where a scale is NaN, they are the zero points.
    """
    low, high = (-127, 127) if bits == 8 else (-8, 7) if symmetric else (0, 15)
    rounded = (groups / scales[..., None]).round_().add_(zeros[..., None]).clamp_(low, high)
    return torch.where(scales.isnan()[..., None], zeros[..., None], rounded)


#: (groups, least of each, largest, candidate) -> (integers less their zero points, scales, zero points)
_Rounding = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]


def _best(
    groups: Tensor,
    candidates: tuple[float, ...],
    rounding: _Rounding,
    scale_dtype: torch.dtype,
    middle: int = 0,
) -> tuple[Tensor, Tensor]:
    """Scales and zero points of the candidates of least error; 1 and ``middle`` of a group of zeros."""
    wide = groups.double()
    total = wide.square().sum(-1)
    least = torch.full_like(total, torch.inf)
    scales = torch.where(total == 0, 1.0, torch.nan).float()
    zeros = torch.full_like(scales, middle)
    # Zero is in the range of every group.
    lowest = highest = torch.zeros_like(scales)
    if groups.shape[-1]:
        lowest, highest = groups.amin(-1).clamp_(max=0), groups.amax(-1).clamp_(min=0)
    for candidate in candidates:
        integers, first, zero = rounding(groups, lowest, highest, candidate)
        squares = integers.double().square().sum(-1)
        products = (wide * integers).sum(-1)
        # Of all scales for these integers, the one of least squares.
        fitted = torch.where(squares > 0, (products / squares).float(), first).to(scale_dtype).float()
        error = total - fitted.double() * (2 * products - fitted.double() * squares)
        better = (error < least) & (total > 0)
        least = torch.where(better, error, least)
        scales, zeros = torch.where(better, fitted, scales), torch.where(better, zero, zeros)
    # Of numbers so small that no scale is left of them.
    return torch.where(scales == 0, 1.0, scales), torch.where(scales == 0, middle, zeros)


def _symmetric(low: int, high: int) -> _Rounding:
    def rounding(
        groups: Tensor, lowest: Tensor, highest: Tensor, end: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        largest = torch.maximum(-lowest, highest)
        if -low > high:  # The largest magnitude goes to the end that reaches further: scales may be negative.
            largest = torch.where(-lowest >= highest, largest, -largest)
        scales = largest / end
        integers = (groups / _no_zeros(scales)[..., None]).round_().clamp_(low, high)
        return integers, scales, torch.zeros_like(scales)

    return rounding


def _asymmetric(
    groups: Tensor, lowest: Tensor, highest: Tensor, share: float
) -> tuple[Tensor, Tensor, Tensor]:
    lowest, highest = lowest * share, highest * share
    scales = (highest - lowest) / 15
    divisors = _no_zeros(scales)
    zeros = (-lowest / divisors).round_().clamp_(0, 15)
    integers = (groups / divisors[..., None]).round_().add_(zeros[..., None]).clamp_(0, 15)
    return integers.sub_(zeros[..., None]), scales, zeros


def _no_zeros(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1.0, scales)


def _check(op: str, weight: Tensor, scale_dtype: torch.dtype) -> None:
    check_dtype(op, "weight", weight)
    if weight.dim() != 2:
        raise ShapeError(
            f"liteboost::{op}: weight must have shape [out_features, in_features], got "
            f"{shape_text(weight.shape)}; pass the matrix of a linear layer"
        )
    if scale_dtype not in _SCALE_DTYPES:
        raise DTypeError(
            f"liteboost::{op}: scale_dtype must be float32, bfloat16 or float16, got "
            f"{dtype_name(scale_dtype)}; choose one of them"
        )


define("quantize_w8(Tensor weight, ScalarType scale_dtype) -> (Tensor, Tensor)", quantize_w8)
define(
    "quantize_w4(Tensor weight, int group_size, bool symmetric, ScalarType scale_dtype) -> "
    "(Tensor, Tensor, Tensor)",
    quantize_w4,
)
