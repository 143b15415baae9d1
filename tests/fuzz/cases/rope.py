"""rope."""

from __future__ import annotations

import torch
from fuzz import tensors
from fuzz.bounds import FP32, TINY, UNIT, assert_same, assert_within, double, exact
from fuzz.table import Case, fuzzes
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

from liteboost_adaptor.ops.rope import LAYOUTS


@fuzzes("rope")
def rope(draw: DrawFn) -> Case:
    return _case(draw)


@fuzzes("rope_")
def rope_in_place(draw: DrawFn) -> Case:
    case = _case(draw)
    for name in ("q", "k"):  # memory of their own
        case.arguments[name] = case.arguments[name].clone(memory_format=torch.contiguous_format)
    return case


def _case(draw: DrawFn) -> Case:
    dtype = draw(tensors.DTYPES)
    pairs = draw(st.one_of(st.sampled_from([0, 1, 2, 4, 8, 16, 32, 33]), st.integers(0, 70)))
    rest = draw(st.sampled_from([0, 0, 1, 16, 31]))
    batch, length, unsqueeze_dim = draw(tensors.COUNTS), draw(tensors.COUNTS), draw(st.sampled_from([1, 2]))
    half_table = draw(st.booleans())
    table = [length, pairs if half_table else 2 * pairs]
    if draw(st.booleans()):
        table.insert(0, draw(st.sampled_from([1, batch])))
    table_dtype = tensors.same_or_float32(draw, dtype)

    def states(heads: int) -> Tensor:
        places = (heads, length) if unsqueeze_dim == 1 else (length, heads)
        return tensors.tensor(draw, (batch, *places, 2 * pairs + rest), dtype, draw(tensors.SCALES))

    arguments = {
        "q": states(draw(st.integers(0, 5))),
        "k": states(draw(st.integers(0, 3))),
        "cos": tensors.tensor(draw, table, table_dtype),
        "sin": tensors.tensor(draw, table, table_dtype),
        "unsqueeze_dim": unsqueeze_dim,
        "layout": draw(st.sampled_from(LAYOUTS)),
        "rotary_dim": 2 * pairs if half_table or draw(st.booleans()) else 0,
    }

    def check(results: list[Tensor]) -> None:
        # With all signs the same, one of the two is the sum of the products' magnitudes.
        magnitudes = {
            name: double(value).abs() if isinstance(value, Tensor) else value
            for name, value in arguments.items()
        }
        sums = exact("rope", magnitudes), exact("rope", {**magnitudes, "sin": -magnitudes["sin"]})
        for i, (result, want) in enumerate(zip(results, exact("rope", arguments), strict=True)):
            given = arguments["qk"[i]]
            assert result.dtype == dtype
            terms = torch.maximum(sums[0][i].abs(), sums[1][i].abs())
            bound = 4 * FP32 * terms + 1.01 * UNIT[dtype] * want.abs() + TINY[dtype]
            assert_within(result, want, bound)
            assert_same(result[..., 2 * pairs :].contiguous(), given[..., 2 * pairs :])

    return Case(arguments, check)
