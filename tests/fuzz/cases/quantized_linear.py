"""linear_packed of 8 and of 4 bits, and linear_w4a8."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from fuzz import tensors
from fuzz.bounds import FP32, TINY, UNIT, assert_within, double, exact
from fuzz.table import Case, fuzzes
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

from liteboost_adaptor.ops.quantized_linear import (
    PACK,
    dequantize_w8,
    prepack,
    prepack_scales,
    quantize_packs,
    unpack_scales,
)

OUTPUTS = st.one_of(st.integers(0, 20), st.sampled_from([63, 64, 65, 70, 129]))
ROWS = st.sampled_from([None, None, 1, 4, 5, 16, 17, 32, 33])


def sliced(tensor: Tensor, gap: int) -> Tensor:
    """As a slice of rows that are ``gap`` wider."""
    return F.pad(tensor, (gap, 0))[..., gap:]


def _case(x: Tensor, layer: dict[str, Tensor | None], bias: Tensor | None, gap: int, spread: Tensor) -> Case:
    """``spread``: the weight's magnitudes, with what a zero point takes off again."""
    zeros, outputs = layer.get("zero_points"), len(layer["weight"])
    arguments = {
        "x": x,
        "tiles": sliced(prepack(layer["weight"]), gap),
        "scales": prepack_scales(layer["scales"]),
        "zero_points": None if zeros is None else sliced(prepack_scales(zeros), gap),
        "bias": bias,
        "out_features": outputs,
    }

    def check(results: list[Tensor]) -> None:
        (want,) = exact("linear_packed", arguments)
        assert results[0].dtype == x.dtype
        products = F.linear(double(x).abs(), spread, None if bias is None else double(bias).abs())
        sums = (16 + x.shape[-1] / 2) * FP32 * products
        bound = 1.01 * UNIT[x.dtype] * want.abs() + sums + TINY[x.dtype]
        # The weight is rounded, and perhaps the product before the bias.
        if results[0].numel() > 32 * outputs:
            bound = bound + 2.1 * UNIT[x.dtype] * products
        assert_within(results[0], want, bound)

    return Case(arguments, check)


@fuzzes("linear_packed")
def linear_packed(draw: DrawFn) -> Case:
    return draw(st.sampled_from([_of_8_bits, _of_4_bits]))(draw)


def _of_8_bits(draw: DrawFn) -> Case:
    dtype, width, outputs = draw(tensors.DTYPES), draw(tensors.WIDTHS), draw(OUTPUTS)
    rows, gap = draw(ROWS), draw(st.sampled_from([0, 0, 3]))
    size = tensors.shape(draw, width=width) if rows is None else (rows, width)
    x = tensors.tensor(draw, size, dtype, draw(tensors.SCALES))
    layer = {
        "weight": torch.randint(-128, 128, (outputs, width), dtype=torch.int8),
        "scales": tensors.tensor(draw, (outputs,), draw(tensors.DTYPES), 0.01),
    }
    spread = dequantize_w8(**layer, dtype=torch.float64).abs()
    return _case(x, layer, tensors.maybe(draw, (outputs,), dtype), gap, spread)


@fuzzes("linear_w4a8")
def linear_w4a8(draw: DrawFn) -> Case:
    case = _of_4_bits(draw)
    arguments = case.arguments
    x, bias = arguments["x"], arguments["bias"]
    scales = unpack_scales(arguments["scales"], arguments["out_features"])

    def check(results: list[Tensor]) -> None:
        (want,) = exact("linear_w4a8", arguments)
        assert results[0].dtype == x.dtype
        integers, units = quantize_packs(x)
        rounded = double(integers).abs() * double(units).repeat_interleave(PACK, dim=-1)
        spread = 16 * double(scales).abs().repeat_interleave(x.shape[-1] // scales.shape[1], dim=1)
        products = F.linear(rounded, spread, None if bias is None else double(bias).abs())
        bound = 1.01 * UNIT[x.dtype] * want.abs() + (16 + x.shape[-1] / PACK) * FP32 * products
        assert_within(results[0], want, bound + TINY[x.dtype])

    return Case(arguments, check)


def _of_4_bits(draw: DrawFn) -> Case:
    dtype, outputs = draw(tensors.DTYPES), draw(OUTPUTS)
    group, groups = draw(st.sampled_from([32, 32, 64, 96, 128])), draw(st.integers(1, 5))
    width, rows, gap = group * groups, draw(ROWS), draw(st.sampled_from([0, 0, 3]))
    size = tensors.shape(draw, width=width) if rows is None else (rows, width)
    x = tensors.tensor(draw, size, dtype, draw(tensors.SCALES))
    scales = tensors.tensor(draw, (outputs, groups), draw(tensors.DTYPES), 0.1)
    layer = {
        "weight": torch.randint(0, 256, (outputs, width // 2), dtype=torch.uint8),
        "scales": scales,
        "zero_points": torch.randint(0, 17, (outputs, groups), dtype=torch.uint8)
        if draw(st.booleans())
        else None,
    }
    # What is summed before a zero point is taken off.
    spread = 16 * double(scales).abs().repeat_interleave(group, dim=1)
    return _case(x, layer, tensors.maybe(draw, (outputs,), dtype), gap, spread)
