"""experts_packed."""

from __future__ import annotations

import torch
from fuzz import tensors
from fuzz.bounds import FP32, TINY, UNIT, assert_within, double, exact
from fuzz.table import Case, fuzzes
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

# Of few experts, so that some have more rows than the loops on integers take.
TOKENS = st.sampled_from([1, 1, 2, 3, 5, 0, 33, 70])


def _tiles(draw: DrawFn, tiles: int) -> tuple[int, dict[str, Tensor | None], int]:
    """in_features, the weights' tensors, and the columns of a group."""
    bits = draw(st.sampled_from([8, 4]))
    group, groups = draw(st.sampled_from([32, 64, 128])), draw(st.integers(1, 3))
    width = group * groups if bits == 4 else draw(st.integers(1, 140))
    groups = groups if bits == 4 else 1
    shape, kind = (tiles, -(-width // 32) * 8, 64), torch.int8
    if bits == 4:
        shape, kind = (tiles, width // 8, 64), torch.uint8
    low, high = (-128, 128) if bits == 8 else (0, 256)
    has_zeros = bits == 4 and draw(st.booleans())
    zeros = torch.randint(0, 17, (tiles, groups, 16), dtype=torch.uint8) if has_zeros else None
    return (
        width,
        {
            "tiles": torch.randint(low, high, shape, dtype=kind),
            "scales": tensors.tensor(draw, (tiles, groups, 16), draw(tensors.DTYPES), 0.05),
            "zero_points": zeros,
        },
        width // groups,
    )


@fuzzes("experts_packed")
def experts_packed(draw: DrawFn) -> Case:
    dtype, tokens, slots = draw(tensors.DTYPES), draw(TOKENS), draw(st.integers(0, 3))
    experts, a_expert = draw(st.integers(0, 4)), draw(st.integers(1, 3))
    width, weights, group = _tiles(draw, experts * a_expert)
    size = (tokens, width) if draw(st.booleans()) else (tokens, slots, width)
    index = torch.randint(0, experts + 1, (slots, tokens)).mT  # `experts` itself: none here
    arguments = {
        "x": tensors.tensor(draw, size, dtype, draw(tensors.SCALES)),
        **weights,
        "bias": tensors.maybe(draw, (experts, 16 * a_expert), dtype),
        "index": index if draw(st.booleans()) else index.contiguous(),
        "out_features": 16 * a_expert,
    }

    def check(results: list[Tensor]) -> None:
        assert results[0].dtype == dtype
        (want,) = exact("experts_packed", arguments)
        # All integers at their largest, of one sign: what is summed before a zero point is taken off.
        scales, bias = double(weights["scales"]).abs(), arguments["bias"]
        is_w8 = weights["tiles"].dtype == torch.int8
        largest = torch.full_like(weights["tiles"], 127 if is_w8 else 255)
        (products,) = exact(
            "experts_packed",
            arguments
            | {
                "x": double(arguments["x"]).abs(),
                "tiles": largest,
                "scales": scales * (128 / 127 if is_w8 else 24 / 15),
                "zero_points": None if is_w8 else torch.zeros_like(scales, dtype=torch.uint8),
                "bias": None if bias is None else double(bias).abs(),
            },
        )
        bound = 1.01 * UNIT[dtype] * want.abs() + (16 + group / 2) * FP32 * products + TINY[dtype]
        if tokens * slots > 32:  # the weight may be rounded, and the product before the bias
            bound = bound + 2.1 * UNIT[dtype] * products
        assert_within(results[0], want, bound)

    return Case(arguments, check)
