"""head_linear."""

from __future__ import annotations

from fuzz import tensors
from fuzz.bounds import FP32, TINY, UNIT, assert_within, double, exact
from fuzz.table import Case, fuzzes
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor


@fuzzes("head_linear")
def head_linear(draw: DrawFn) -> Case:
    dtype, inputs = draw(tensors.DTYPES), draw(tensors.WIDTHS)
    outputs = draw(st.one_of(st.integers(0, 20), st.sampled_from([63, 64, 65, 129])))
    batch, rows = (draw(st.sampled_from([1, 1, 0, 2, 3])) for _ in range(2))
    heads = draw(st.sampled_from([1, 2, 3, 0]))
    arguments = {
        "x": tensors.tensor(draw, (batch, heads, rows, inputs), dtype, draw(tensors.SCALES)),
        "weight": tensors.tensor(draw, (heads, outputs, inputs), dtype),
    }

    def check(results: list[Tensor]) -> None:
        (want,) = exact("head_linear", arguments)
        assert results[0].dtype == dtype
        products = double(arguments["x"]).abs() @ double(arguments["weight"]).abs().mT
        # Where outputs lie side by side, products are added one after the other.
        bound = 1.01 * UNIT[dtype] * want.abs() + (16 + inputs) * FP32 * products + TINY[dtype]
        assert_within(results[0], want, bound)

    return Case(arguments, check)
