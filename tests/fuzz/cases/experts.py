"""experts_linear, experts_combine."""

from __future__ import annotations

import torch
from fuzz import tensors
from fuzz.bounds import FP32, TINY, UNIT, assert_within, double, exact
from fuzz.table import Case, fuzzes
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

OUTPUTS = st.one_of(st.integers(0, 20), st.sampled_from([63, 64, 65, 129, 257]))
# Of few experts, so that some have more rows than one pass of the loops takes.
TOKENS = st.sampled_from([1, 1, 2, 3, 5, 0, 33, 70])


@fuzzes("experts_linear")
def experts_linear(draw: DrawFn) -> Case:
    dtype, width, outputs = draw(tensors.DTYPES), draw(st.integers(0, 140)), draw(OUTPUTS)
    tokens, slots, experts = draw(TOKENS), draw(st.integers(0, 3)), draw(st.integers(0, 4))
    size = (tokens, width) if draw(st.booleans()) else (tokens, slots, width)
    index = torch.randint(0, experts + 1, (slots, tokens)).mT  # `experts` itself: none here
    arguments = {
        "x": tensors.tensor(draw, size, dtype, draw(tensors.SCALES)),
        "weight": tensors.tensor(draw, (experts, outputs, width), dtype),
        "bias": tensors.maybe(draw, (experts, outputs), dtype),
        "index": index if draw(st.booleans()) else index.contiguous(),
    }

    def check(results: list[Tensor]) -> None:
        assert results[0].dtype == dtype
        (want,) = exact("experts_linear", arguments)
        magnitudes = {
            name: value if name == "index" or value is None else double(value).abs()
            for name, value in arguments.items()
        }
        (products,) = exact("experts_linear", magnitudes)
        # The longest chain of additions is a lane of four's; each step rounds a product and a sum.
        bound = 1.01 * UNIT[dtype] * want.abs() + (16 + 2 * width) * FP32 * products + TINY[dtype]
        assert_within(results[0], want, bound)

    return Case(arguments, check)


@fuzzes("experts_combine")
def experts_combine(draw: DrawFn) -> Case:
    dtype, width = draw(tensors.DTYPES), draw(tensors.WIDTHS)
    tokens, slots = draw(TOKENS), draw(st.integers(0, 9))
    arguments = {
        "y": tensors.tensor(draw, (tokens, slots, width), dtype, draw(tensors.SCALES)),
        "scores": tensors.tensor(draw, (tokens, slots), tensors.same_or_float32(draw, dtype)),
    }

    def check(results: list[Tensor]) -> None:
        assert results[0].dtype == dtype
        (want,) = exact("experts_combine", arguments)
        (terms,) = exact("experts_combine", {name: double(each).abs() for name, each in arguments.items()})
        bound = 1.01 * UNIT[dtype] * want.abs() + (4 + 2 * slots) * FP32 * terms + TINY[dtype]
        assert_within(results[0], want, bound)

    return Case(arguments, check)
