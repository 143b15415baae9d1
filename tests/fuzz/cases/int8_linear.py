"""linear_w8a8."""

from __future__ import annotations

import torch
from fuzz import tensors
from fuzz.table import Case, fuzzes
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

from liteboost_adaptor.ops.int8_linear import linear_w8a8 as reference

from .quantized_linear import OUTPUTS, ROWS, sliced


@fuzzes("linear_w8a8")
def linear_w8a8(draw: DrawFn) -> Case:
    dtype, width, outputs = draw(tensors.DTYPES), draw(tensors.WIDTHS), draw(OUTPUTS)
    rows, gap = draw(ROWS), draw(st.sampled_from([0, 0, 3]))
    size = tensors.shape(draw, width=width) if rows is None else (rows, width)
    arguments = {
        "x": tensors.tensor(draw, size, dtype, draw(tensors.SCALES)),
        "weight": sliced(torch.randint(-128, 128, (outputs, width), dtype=torch.int8), gap),
        "scales": tensors.tensor(draw, (outputs,), draw(tensors.DTYPES), 0.01),
        "bias": tensors.maybe(draw, (outputs,), dtype),
    }

    def check(results: list[Tensor]) -> None:
        # Sums of integers are exact and the roundings after them are written down: the reference's bits.
        want = reference(**arguments)
        assert results[0].dtype == dtype
        torch.testing.assert_close(results[0], want, rtol=0, atol=0, equal_nan=True)

    return Case(arguments, check)
