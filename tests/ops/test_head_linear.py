"""`liteboost::head_linear` against float64, at every instruction set, length and layout."""

from __future__ import annotations

import pytest
import torch
from support.compare import (
    DTYPES,
    assert_refused,
    assert_same_on_any_threads,
    same_bits,
    sentinel_view,
)
from torch import Tensor

from liteboost_adaptor.errors import ShapeError
from liteboost_adaptor.ops.head_linear import head_linear as reference

op = torch.ops.liteboost.head_linear
SIZES = [1, 7, 65, 259]


def operands(dtype: torch.dtype, inputs: int, outputs: int, rows: int = 2) -> tuple[Tensor, Tensor]:
    x, weight = torch.randn(2, 3, rows, inputs), torch.randn(3, outputs, inputs) * inputs**-0.5
    return x.to(dtype), weight.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ["inputs", "outputs"])
def test_values_at_every_length(isa: str, dtype: torch.dtype, order: str) -> None:
    unit = torch.finfo(dtype).eps / 2
    for inputs in SIZES:
        for outputs in SIZES:
            x, weight = operands(dtype, inputs, outputs)
            given = weight if order == "inputs" else weight.mT.contiguous().mT
            found, exact = op(x, given), x.double() @ weight.double().mT
            assert found.is_contiguous() and found.dtype == dtype and found.shape == exact.shape
            products = x.double().abs() @ weight.double().abs().mT
            bound = 1.01 * unit * exact.abs() + (16 + inputs) * 2.0**-24 * products + 1e-36
            # Of fp16, also those that are denormal there.
            bound += 2.0**-24 if dtype == torch.float16 else 0.0
            assert bool(((found.double() - exact).abs() <= bound).all()), (inputs, outputs)
            torch.testing.assert_close(found, reference(x, given))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts_give_the_same_bits(isa: str, dtype: torch.dtype) -> None:
    x, weight = operands(dtype, 77, 70)
    of_inputs, of_outputs = op(x, weight), op(x, weight.mT.contiguous().mT)
    for name, view in {
        "transposed": x.mT.contiguous().mT,
        "rows before heads": x.transpose(1, 2).contiguous().transpose(1, 2),
        "every other": torch.stack((x, x), -1)[..., 0],
        "sentinels": sentinel_view(x),
    }.items():
        assert same_bits(op(view, weight), of_inputs), name
    both = torch.cat((weight, weight), 1)
    assert same_bits(op(x, both[:, 70:]), of_inputs) and same_bits(op(x, sentinel_view(weight)), of_inputs)
    assert same_bits(op(x, torch.stack((weight, weight), -1)[..., 0]), of_inputs)
    # Outputs side by side, as in a part of a weight that is read transposed.
    assert same_bits(op(x, sentinel_view(weight.mT.contiguous()).mT), of_outputs)


@pytest.mark.parametrize(
    "sizes", [(0, 3, 2, 5, 4), (2, 0, 2, 5, 4), (2, 3, 0, 5, 4), (2, 3, 2, 5, 0), (1, 3, 2, 0, 4)]
)
def test_empty(isa: str, sizes: tuple[int, ...]) -> None:
    batch, heads, rows, inputs, outputs = sizes
    found = op(torch.randn(batch, heads, rows, inputs), torch.randn(heads, outputs, inputs))
    assert found.shape == (batch, heads, rows, outputs) and not found.any()


def test_many_rows(isa: str) -> None:
    for dtype in DTYPES:
        x, weight = operands(dtype, 65, 40, rows=70)
        found, exact = op(x, weight), x.double() @ weight.double().mT
        assert found.is_contiguous() and found.dtype == dtype
        assert (found.double() - exact).norm() <= (torch.finfo(dtype).eps + 1e-6) * exact.norm()


def test_result_does_not_depend_on_threads() -> None:
    x, weight = operands(torch.bfloat16, 513, 259)
    assert_same_on_any_threads(lambda: [op(x, weight), op(x, weight.mT.contiguous().mT)])


def test_arguments_are_checked() -> None:
    x, weight = operands(torch.float32, 5, 4)
    for arguments, text in (
        ((x[0], weight), "x must have shape"),
        ((x, weight[0]), "weight must have shape"),
        ((x, weight[:2]), "num_heads and in_features of x"),
        ((x, weight[..., :3]), "num_heads and in_features of x"),
    ):
        assert_refused((reference,), arguments, ShapeError, text)
        assert_refused((op, reference), arguments, ValueError, text)
    assert_refused((op, reference), (x.long(), weight), TypeError, "x must be float32")
    assert_refused((op, reference), (x, weight.half()), TypeError, "weight must have the dtype of x")


def test_gradient_is_refused(isa: str) -> None:
    x, weight = operands(torch.float32, 5, 4)
    for given in ((x.requires_grad_(), weight), (x.detach(), weight.requires_grad_())):
        with pytest.raises(RuntimeError, match="liteboost::head_linear: has no backward"):
            op(*given)
        with torch.no_grad():
            assert not op(*given).requires_grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    torch.library.opcheck(op, operands(dtype, 33, 17))
