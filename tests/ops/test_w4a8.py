"""`linear_w4a8` against float64 on the very integers, at every instruction set, layout and number of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from ops.test_quantized_linear import DTYPES, UNIT, W4_FORMS, packed, w4

from liteboost_adaptor.ops import ops
from liteboost_adaptor.ops.quantized_linear import PACK, dequantize_w4, quantize_packs

op = torch.ops.liteboost.linear_w4a8
REFERENCE = ops()["linear_w4a8"].reference
#: Every form of the loops, and more than one chunk of rows.
ROWS = [1, 2, 3, 4, 5, 7, 9, 13, 16, 17, 33, 70]


def run(x: torch.Tensor, layer: dict[str, torch.Tensor], bias: torch.Tensor | None = None) -> torch.Tensor:
    return op(x, *packed(layer), bias, len(layer["weight"]))


def check(x: torch.Tensor, layer: dict[str, torch.Tensor], bias: torch.Tensor | None, given=None) -> None:
    """Each element of the op's result, or of ``given``, within the roundings of the order that it has."""
    result = run(x, layer, bias) if given is None else given
    integers, units = quantize_packs(x)
    rounded = integers.double() * units.double().repeat_interleave(PACK, dim=-1)
    weight = dequantize_w4(**layer, dtype=torch.float64)
    exact = F.linear(rounded, weight, None if bias is None else bias.double())
    products = F.linear(rounded.abs(), weight.abs(), None if bias is None else bias.double().abs())
    assert result.shape == exact.shape and result.dtype == x.dtype and result.is_contiguous()
    bound = 1.01 * UNIT[x.dtype] * exact.abs() + (4 + x.shape[-1] / PACK) * 2.0**-24 * products + 1e-30
    assert ((result.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("group", "zeros"), W4_FORMS)
@pytest.mark.parametrize("rows", ROWS)
def test_every_number_of_rows(isa: str, rows: int, group: int, zeros: bool, dtype: torch.dtype) -> None:
    layer = w4(37, 384, group, zeros, torch.bfloat16 if rows % 2 else torch.float32)
    x, bias = torch.randn(rows, 384).to(dtype), torch.randn(37).to(dtype)
    check(x, layer, bias if rows % 3 else None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_number_of_rows_changes_no_bit(isa: str, dtype: torch.dtype) -> None:
    layer = w4(64, 256, 32, True)
    x = torch.randn(200, 256).to(dtype)
    whole = run(x, layer)
    for rows in (*ROWS, 150):
        assert torch.equal(run(x[:rows], layer), whole[:rows])
    assert torch.equal(run(x[199:], layer), whole[199:])


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("columns", "group"),
    [(1184, 32), (1184, 1184), (3168, 96)],
    ids=["groups of a pack", "one group", "groups across blocks"],
)
def test_more_columns_than_are_multiplied_at_a_time(isa: str, columns: int, group: int, zeros: bool) -> None:
    layer, x = w4(37, columns, group, zeros), torch.randn(70, columns)
    whole = run(x, layer)
    check(x, layer, None, whole)
    for rows in (1, 2, 5, 8, 13, 65):
        assert torch.equal(run(x[:rows], layer), whole[:rows])


@pytest.mark.parametrize("outputs", [1, 15, 16, 17, 64, 129])
def test_every_number_of_outputs(outputs: int) -> None:
    layer = w4(outputs, 96, 32, outputs % 2 == 0)
    for rows in (1, 6, 40):
        check(torch.randn(rows, 96), layer, torch.randn(outputs))


def test_strides_offsets_and_empty_sizes() -> None:
    layer = w4(33, 128, 64, False)
    wide = torch.randn(3, 5, 300)
    for x in (wide[..., 7:135], wide.transpose(0, 1)[..., 2:130], wide[0, 0, 1:129], wide[:, :0, :128]):
        check(x, layer, None)
    assert run(torch.randn(0, 128), layer).shape == (0, 33)


def test_rows_of_zeros_and_of_the_least_and_the_largest_numbers() -> None:
    layer, bias = w4(20, 64, 32, True), torch.randn(20)
    x = torch.zeros(4, 64)
    x[1], x[2], x[3] = 1e-38, torch.randn(64) * 1e-30, torch.randn(64) * 1e30
    check(x, layer, bias)
    assert torch.equal(run(x, layer, bias)[0], bias)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_what_is_not_finite_makes_its_row_nan(value: float, rows: int) -> None:
    layer = w4(20, 96, 32, False)
    x = torch.randn(rows, 96)
    expected = run(x, layer)
    x[rows // 2, 40] = value
    found = run(x, layer)
    assert found[rows // 2].isnan().all()
    others = [row for row in range(rows) if row != rows // 2]
    assert torch.equal(found[others], expected[others])
    assert REFERENCE(x, *packed(layer), None, 20)[rows // 2].isnan().all()


def test_one_large_column_costs_its_neighbours_precision_and_no_others() -> None:
    layer = w4(16, 128, 32, False)
    x = torch.randn(1, 128)
    spoiled = x.clone()
    spoiled[0, 3] = 1e4
    integers, units = quantize_packs(spoiled)
    assert torch.equal(integers[:, 32:], quantize_packs(x)[0][:, 32:]) and units[0, 0] > 70 > units[0, 1]
    check(spoiled, layer, None)


def test_the_number_of_threads_changes_no_bit() -> None:
    layer, x = w4(1000, 256, 32, True), torch.randn(40, 256)
    whole, threads = run(x, layer), torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(run(x, layer), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_at_once_are_the_bits_of_each(dtype: torch.dtype) -> None:
    first, second = w4(48, 128, 32, False), w4(20, 128, 32, False)
    for rows in (1, 40):
        x, bias = torch.randn(rows, 128).to(dtype), torch.randn(20).to(dtype)
        lists = [list(each) for each in zip(packed(first), packed(second), strict=True)]
        found = torch.ops.liteboost._linears_packed(x, *lists, [None, bias], [48, 20], True)
        assert torch.equal(found[0], run(x, first)) and torch.equal(found[1], run(x, second, bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck_and_reference(dtype: torch.dtype) -> None:
    layer, x, bias = w4(21, 96, 32, True), torch.randn(2, 3, 96).to(dtype), torch.randn(21).to(dtype)
    torch.library.opcheck(op, (x, *packed(layer), bias, 21))
    check(x, layer, bias, REFERENCE(x, *packed(layer), bias, 21))


def test_what_does_not_fit_is_an_error() -> None:
    layer, x = packed(w4(21, 96, 32, False)), torch.randn(2, 96)
    for call in (op, REFERENCE):
        with pytest.raises(TypeError, match="linear_w4a8: tiles must be uint8, of 4 bits, got"):
            call(x, layer[0].to(torch.int8), *layer[1:], None, 21)
        with pytest.raises(ValueError, match="linear_w4a8: x must have in_features last"):
            call(x[:, :64], *layer, None, 21)
        with pytest.raises(ValueError, match="linear_w4a8: out_features must be those of 2 tiles"):
            call(x, *layer, None, 48)
        with pytest.raises(ValueError, match="linear_w4a8: bias must have shape"):
            call(x, *layer, torch.randn(20), 21)
    with pytest.raises(RuntimeError, match=r"linear_w4a8: .*has no backward"):
        op(x.requires_grad_(), *layer, None, 21)
