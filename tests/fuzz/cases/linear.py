"""linear, gated_linear."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from fuzz import tensors
from fuzz.bounds import FP32, TINY, UNIT, assert_within, double, exact
from fuzz.table import Case, fuzzes
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

from liteboost_adaptor.ops.activation import ACTIVATIONS


@fuzzes("linear")
def linear(draw: DrawFn) -> Case:
    dtype, width = draw(tensors.DTYPES), draw(tensors.WIDTHS)
    outputs = draw(st.one_of(st.integers(0, 20), st.sampled_from([63, 64, 65, 70, 129])))
    # Few rows are the case the kernel is made for; around 32 and 64 it changes its ways.
    rows = draw(st.sampled_from([None, None, 1, 4, 5, 31, 32, 33, 64, 65]))
    size = tensors.shape(draw, width=width) if rows is None else (rows, width)
    x = tensors.tensor(draw, size, dtype, draw(tensors.SCALES))
    weight = tensors.tensor(draw, (outputs, width), dtype)
    bias = tensors.maybe(draw, (outputs,), dtype)
    arguments = {"x": x, "weight": weight, "bias": bias}

    def check(results: list[Tensor]) -> None:
        (want,) = exact("linear", arguments)
        assert results[0].dtype == dtype
        products = F.linear(
            double(x).abs(), double(weight).abs(), None if bias is None else double(bias).abs()
        )
        # The longest chain of additions is a lane of four's; each step rounds a product and a sum.
        rounded = want.abs()
        if bias is not None and (weight.stride(1) != 1 or results[0].numel() > 32 * outputs):
            # Perhaps at::linear's, which may round the product before it adds the bias.
            rounded = rounded + (want - double(bias)).abs()
        bound = 1.01 * UNIT[dtype] * rounded + (16 + width / 2) * FP32 * products + TINY[dtype]
        assert_within(results[0], want, bound)

    return Case(arguments, check)


@fuzzes("gated_linear")
def gated_linear(draw: DrawFn) -> Case:
    dtype, width = draw(tensors.DTYPES), draw(tensors.WIDTHS)
    outputs = draw(st.one_of(st.integers(0, 20), st.sampled_from([63, 65, 129])))
    rows = draw(st.sampled_from([None, 1, 5, 33, 65]))
    size = tensors.shape(draw, width=width) if rows is None else (rows, width)
    kind = draw(st.sampled_from(ACTIVATIONS))
    arguments = {
        "x": tensors.tensor(draw, size, dtype, draw(tensors.SCALES)),
        "gate_weight": tensors.tensor(draw, (outputs, width), dtype),
        "gate_bias": tensors.maybe(draw, (outputs,), dtype),
        "up_weight": tensors.tensor(draw, (outputs, width), dtype),
        "up_bias": tensors.maybe(draw, (outputs,), dtype),
        "activation": kind,
        "alpha": draw(st.sampled_from([1.0, 1.702])) if kind == "silu" else 1.0,
    }

    def check(results: list[Tensor]) -> None:
        # It is defined as these ops, each of which has bounds of its own.
        ops = torch.ops.liteboost
        gate = ops.linear(arguments["x"], arguments["gate_weight"], arguments["gate_bias"])
        up = ops.linear(arguments["x"], arguments["up_weight"], arguments["up_bias"])
        want = ops.gated_activation(gate, up, kind, arguments["alpha"])
        assert results[0].dtype == dtype
        torch.testing.assert_close(results[0], want, rtol=0, atol=0, equal_nan=True)

    return Case(arguments, check)
