"""quantize_w8 and quantize_w4."""

from __future__ import annotations

import torch
from fuzz import tensors
from fuzz.table import Case, fuzzes
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

from liteboost_adaptor.ops.quantize_weight import quantize_w4 as reference_w4
from liteboost_adaptor.ops.quantize_weight import quantize_w8 as reference_w8
from liteboost_adaptor.ops.quantized_linear import unpack_w4

#: Quotients are rounded to fp32 before they are rounded to integers.
QUOTIENT = 1e-4


def assert_rounds(
    groups: Tensor,
    integers: Tensor,
    scales: Tensor,
    low: Tensor,
    high: Tensor,
    plain: Tensor,
    step: float = 0.0,
) -> None:
    """Assert that integers are the nearest, and that no more is lost than with scales of ``plain``.

    Args:
        groups: ``[..., columns]``, float64.
        integers: Less their zero points, float64.
        scales: ``[..., 1]``, float64, as the op gives them.
        low, high: What integers are at least and at most.
        plain: ``[..., 1]``, float64: scales with which nothing is clipped, of the scales' dtype.
        step: Between the least scales of that dtype.
    """
    want = torch.clamp(groups / scales, low, high)
    assert ((integers - want).abs() <= 0.5 + QUOTIENT).all()
    lost = (groups - integers * scales).square().sum(-1)
    plainly = (groups / plain).round().clamp(-128, 127)
    most = (groups - plainly * plain).square().sum(-1)
    # Scales are rounded after they are fitted, by up to 2^-8, and by half a step where they are subnormal.
    rounding = torch.maximum((groups * 2.0**-8).abs(), integers.abs() * step / 2).square().sum(-1)
    assert (lost <= 1.01 * most + rounding + 1e-30).all()


def _check(
    dtype: torch.dtype, weight: Tensor, integers: Tensor, scales: Tensor, zeros: Tensor, ends: tuple
) -> None:
    """``zeros`` are `[rows, groups]`, ``integers`` less them."""
    low, high, plain_end = ends
    assert scales.dtype == dtype and scales.shape == zeros.shape
    groups = weight.double().reshape(*scales.shape, weight.shape[1] // scales.shape[1])
    found = integers.double().reshape(groups.shape)
    span = torch.maximum(-groups.amin(-1), groups.amax(-1)) / plain_end
    if low == 0:
        span = (groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)) / plain_end
    span = span.to(dtype).double()  # of small weights, fp16 has few scales, or none
    span = torch.where(span == 0, 1.0, span)[..., None]
    wide = zeros.double()[..., None] if low == 0 else torch.zeros_like(span)
    step = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert_rounds(groups, found, scales.double()[..., None], low - wide, high - wide, span, step)


@fuzzes("quantize_w8")
def quantize_w8(draw: DrawFn) -> Case:
    scale_dtype = draw(tensors.DTYPES)
    size = draw(tensors.COUNTS), draw(tensors.WIDTHS)
    weight = tensors.tensor(draw, size, draw(tensors.DTYPES), draw(tensors.SCALES))

    def check(results: list[Tensor]) -> None:
        integers, scales = results
        for found, want in zip(results, reference_w8(weight, scale_dtype), strict=True):
            torch.testing.assert_close(found, want, rtol=0, atol=0)
        assert integers.dtype == torch.int8 and integers.shape == weight.shape
        if weight.numel():
            _check(scale_dtype, weight, integers, scales[:, None], torch.zeros(size[0], 1), (-127, 127, 127))

    return Case({"weight": weight, "scale_dtype": scale_dtype}, check)


@fuzzes("quantize_w4")
def quantize_w4(draw: DrawFn) -> Case:
    scale_dtype, symmetric = draw(tensors.DTYPES), draw(st.booleans())
    group = draw(st.sampled_from([32, 32, 64, 96, 128]))
    size = draw(tensors.COUNTS), group * draw(st.integers(0, 4))
    weight = tensors.tensor(draw, size, draw(tensors.DTYPES), draw(tensors.SCALES))
    form = {"group_size": group, "symmetric": symmetric, "scale_dtype": scale_dtype}

    def check(results: list[Tensor]) -> None:
        packed, scales, zeros = results
        for found, want in zip(results, reference_w4(weight, **form), strict=True):
            torch.testing.assert_close(found, want, rtol=0, atol=0)
        if not weight.numel():
            return
        integers = unpack_w4(packed).reshape(*scales.shape, group) - zeros.double()[..., None]
        ends = (-8, 7, 7) if symmetric else (0, 15, 15)
        _check(scale_dtype, weight, integers, scales, zeros, ends)

    return Case({"weight": weight, **form}, check)
