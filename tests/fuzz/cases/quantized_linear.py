"""linear_w8, linear_w4, and both in tiles."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from fuzz import tensors
from fuzz.bounds import FP32, TINY, UNIT, assert_within, double, exact
from fuzz.table import Case, fuzzes
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

from liteboost_adaptor.ops.quantized_linear import dequantize_w4, dequantize_w8, scales_to_tiles, to_tiles

OUTPUTS = st.one_of(st.integers(0, 20), st.sampled_from([63, 64, 65, 70, 129]))
ROWS = st.sampled_from([None, None, 1, 4, 5, 16, 17, 32, 33])


def _integers(size: tuple[int, ...], dtype: torch.dtype, low: int, high: int, gap: int) -> Tensor:
    """As a slice of rows that are ``gap`` wider."""
    return torch.randint(low, high, (*size[:-1], size[-1] + gap), dtype=dtype)[..., gap:]


def _case(name: str, arguments: dict[str, Tensor | None], weight: Tensor, spread: Tensor) -> Case:
    x, bias = arguments["x"], arguments["bias"]

    def check(results: list[Tensor]) -> None:
        (want,) = exact(name, arguments)
        assert results[0].dtype == x.dtype
        products = F.linear(double(x).abs(), spread, None if bias is None else double(bias).abs())
        bound = (
            1.01 * UNIT[x.dtype] * want.abs() + (16 + weight.shape[1] / 2) * FP32 * products + TINY[x.dtype]
        )
        if results[0].numel() > 32 * len(
            weight
        ):  # the weight is rounded, and perhaps the product before the bias
            bound = bound + 2.1 * UNIT[x.dtype] * products
        assert_within(results[0], want, bound)

    return Case(arguments, check)


def _in_tiles(case: Case) -> Case:
    """The same layer, for `linear_tiles`: the bounds are those of the op that takes it as it is saved."""
    given = case.arguments
    zeros = given.get("zero_points")
    arguments = {
        "x": given["x"],
        "tiles": to_tiles(given["weight"]),
        "scales": scales_to_tiles(given["scales"]),
        "zero_points": None if zeros is None else scales_to_tiles(zeros),
        "bias": given["bias"],
        "out_features": len(given["weight"]),
    }
    return Case(arguments, case.check)


@fuzzes("linear_tiles")
def linear_tiles(draw: DrawFn) -> Case:
    return _in_tiles(draw(st.sampled_from([linear_w8, linear_w4]))(draw))


@fuzzes("linear_w8")
def linear_w8(draw: DrawFn) -> Case:
    dtype, width, outputs = draw(tensors.DTYPES), draw(tensors.WIDTHS), draw(OUTPUTS)
    rows, gap = draw(ROWS), draw(st.sampled_from([0, 0, 3]))
    size = tensors.shape(draw, width=width) if rows is None else (rows, width)
    scales = tensors.tensor(draw, (outputs,), draw(tensors.DTYPES), 0.01)
    arguments = {
        "x": tensors.tensor(draw, size, dtype, draw(tensors.SCALES)),
        "weight": _integers((outputs, width), torch.int8, -128, 128, gap),
        "scales": scales,
        "bias": tensors.maybe(draw, (outputs,), dtype),
    }
    weight = dequantize_w8(arguments["weight"], scales, torch.float64)
    return _case("linear_w8", arguments, weight, weight.abs())


@fuzzes("linear_w4")
def linear_w4(draw: DrawFn) -> Case:
    dtype, outputs = draw(tensors.DTYPES), draw(OUTPUTS)
    group, groups = draw(st.sampled_from([32, 32, 64, 96, 128])), draw(st.integers(1, 5))
    width, rows, gap = group * groups, draw(ROWS), draw(st.sampled_from([0, 0, 3]))
    size = tensors.shape(draw, width=width) if rows is None else (rows, width)
    scales = tensors.tensor(draw, (outputs, groups), draw(tensors.DTYPES), 0.1)
    has_zeros = draw(st.booleans())
    zeros = _integers((outputs, groups), torch.uint8, 0, 17, gap) if has_zeros else None
    arguments = {
        "x": tensors.tensor(draw, size, dtype, draw(tensors.SCALES)),
        "weight": _integers((outputs, width // 2), torch.uint8, 0, 256, gap),
        "scales": scales,
        "zero_points": zeros,
        "bias": tensors.maybe(draw, (outputs,), dtype),
    }
    weight = dequantize_w4(arguments["weight"], scales, zeros, torch.float64)
    # What is summed before a zero point is taken off.
    spread = 16 * double(scales).abs().repeat_interleave(group, dim=1)
    return _case("linear_w4", arguments, weight, spread)
