"""Weights to integers and scales: round to nearest, with a search for where to clip."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...errors import QuantizationError
from .scheme import QuantScheme
from .tensor import QuantizedTensor

#: Elements worked on at a time: what rounding needs beside the weight stays small.
CHUNK = 1 << 20
#: Where the largest magnitude of a group may come to lie, in integers. Less than the end of the range keeps
#: all of it; more clips the largest weights, so that the others are rounded finer.
W4_ENDS = (7.0, 7.5, 8.0, 8.5, 9.0)
W8_ENDS = (127.0, 130.0, 134.0)
#: How much of the range of a group an asymmetric scale covers.
W4_SHARES = (1.0, 0.95, 0.9, 0.85)


def quantize(weight: Tensor, scheme: QuantScheme, name: str = "the weight") -> QuantizedTensor:
    """Round ``weight`` ``[out, in]`` to the integers of ``scheme``.

    Args:
        weight: Floating point. Computed in fp32.
        scheme: What to round to; ``in`` must suit it (`QuantScheme.why_unsupported`).
        name: What errors call it.

    Raises:
        QuantizationError: The weight holds NaN or infinity, or does not suit the scheme.
    """
    reason = scheme.why_unsupported(*weight.shape)
    if reason:
        raise QuantizationError(f"{name} {list(weight.shape)} cannot be quantized to {scheme.name}: {reason}")
    chunks = weight.split(max(1, CHUNK // max(1, weight.shape[1]))) if len(weight) else (weight,)
    return QuantizedTensor.cat([_quantize(chunk, scheme, name) for chunk in chunks])


def _quantize(weight: Tensor, scheme: QuantScheme, name: str) -> QuantizedTensor:
    weight = weight.float()
    if not torch.isfinite(weight).all():
        raise QuantizationError(
            f"{name} holds values that are infinite or not a number: no scale is right for them. Repair the "
            "checkpoint, or leave the layer out with modules_to_not_convert."
        )
    groups = weight[:, None, :] if scheme.bits == 8 else weight.reshape(len(weight), -1, scheme.group_size)
    scales, zeros = fit_scales(groups, scheme)
    return QuantizedTensor.pack(
        round_to_integers(groups, scales, zeros, scheme).reshape(weight.shape), scales, zeros, scheme
    )


def fit_scales(groups: Tensor, scheme: QuantScheme) -> tuple[Tensor, Tensor]:
    """Scales and zero points of least squared error, fp32 ``[out, groups]``: ``[out, groups, columns]``."""
    if scheme.bits == 8:
        return _best(groups, W8_ENDS, _symmetric(-127, 127), scheme.scale_dtype)
    if scheme.symmetric:
        return _best(groups, W4_ENDS, _symmetric(-8, 7), scheme.scale_dtype)
    return _best(groups, W4_SHARES, _asymmetric, scheme.scale_dtype)


def round_to_integers(groups: Tensor, scales: Tensor, zeros: Tensor, scheme: QuantScheme) -> Tensor:
    """Integers, in fp32, of which ``(integer - zero) * scale`` is nearest to ``[out, groups, columns]``."""
    low, high = (-127, 127) if scheme.bits == 8 else (-8, 7) if scheme.symmetric else (0, 15)
    return _divided(groups, scales[..., None]).round_().add_(zeros[..., None]).clamp_(low, high)


#: (groups, least of each, largest of each, candidate, out) -> (first scales, zero points); integers without
#: their zero point are written to ``out``.
Rounding = Callable[[Tensor, Tensor, Tensor, float, Tensor], tuple[Tensor, Tensor]]


@torch.no_grad()
def _best(
    groups: Tensor, candidates: tuple[float, ...], rounding: Rounding, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Scales (rounded to ``scale_dtype``, as fp32) and zero points of least squared error, group by group."""
    least = torch.full(groups.shape[:2], torch.inf)
    best = torch.ones_like(least), torch.zeros_like(least)
    lowest, highest = groups.aminmax(dim=-1)
    # Used for every candidate: to get as much memory from the system each time takes longer than to compute.
    integers, products = torch.empty_like(groups), torch.empty_like(groups)
    for candidate in candidates:
        scales, zeros = rounding(groups, lowest, highest, candidate, integers)
        # Of all scales for these integers, the one of least squares.
        squares = torch.mul(integers, integers, out=products).sum(-1)
        fitted = torch.mul(groups, integers, out=products).sum(-1) / squares
        scales = torch.where(squares > 0, fitted, scales).to(scale_dtype).float()
        torch.mul(integers, scales[..., None], out=products)
        torch.sub(groups, products, out=products)
        error = torch.mul(products, products, out=products).sum(-1)
        better = error < least
        least = torch.where(better, error, least)
        best = torch.where(better, scales, best[0]), torch.where(better, zeros, best[1])
    # A group of zeros, or of numbers so small that no scale is left of them.
    scales = torch.where(best[0] == 0, 1.0, best[0])
    return scales, best[1]


def _symmetric(low: int, high: int) -> Rounding:
    def rounding(
        groups: Tensor, lowest: Tensor, highest: Tensor, end: float, out: Tensor
    ) -> tuple[Tensor, Tensor]:
        largest = torch.maximum(-lowest, highest)
        if -low > high:  # The largest magnitude goes to the end that reaches further: scales may be negative.
            largest = torch.where(-lowest >= highest, largest, -largest)
        scales = largest / end
        _divided(groups, scales[..., None], out).round_().clamp_(low, high)
        return scales, torch.zeros_like(scales)

    return rounding


def _asymmetric(
    groups: Tensor, lowest: Tensor, highest: Tensor, share: float, out: Tensor
) -> tuple[Tensor, Tensor]:
    lowest, highest = lowest.clamp(max=0) * share, highest.clamp(min=0) * share
    scales = (highest - lowest) / 15
    zeros = _divided(-lowest, scales).round_().clamp_(0, 15)
    _divided(groups, scales[..., None], out).round_().add_(zeros[..., None]).clamp_(0, 15)
    out.sub_(zeros[..., None])
    return scales, zeros


def _divided(values: Tensor, scales: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.div(values, torch.where(scales == 0, 1.0, scales), out=out)
