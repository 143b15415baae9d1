"""`experts_packed` against float64, at every instruction set, routing and number of rows."""

from __future__ import annotations

import pytest
import torch

from liteboost_adaptor.ops.experts import ExpertIndexError
from liteboost_adaptor.ops.experts import experts_linear as exact_linear
from liteboost_adaptor.ops.quantized_experts import experts_packed as reference
from liteboost_adaptor.ops.quantized_linear import (
    dequantize_w4,
    dequantize_w8,
    pack_w4,
    prepack,
    prepack_scales,
)

op = torch.ops.liteboost.experts_packed

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = {"8 bits": (0, False), "groups of 32": (32, False), "groups of 64, zero points": (64, True)}
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


class Layer:
    """Weights of experts one below the other, as the op takes them and dequantized."""

    def __init__(self, form: str, experts: int, outputs: int, inputs: int) -> None:
        group, zeros = FORMS[form]
        rows, self.outputs = experts * outputs, outputs
        zero_points = None
        if not group:
            weight = torch.randint(-128, 128, (rows, inputs), dtype=torch.int8)
            scales = torch.rand(rows) * 0.01 + 0.001
            plain, spread = dequantize_w8(weight, scales, torch.float64), 0.0
        else:
            weight = pack_w4(torch.randint(0, 16, (rows, inputs), dtype=torch.uint8))
            scales = (torch.rand(rows, inputs // group) * 0.1 + 0.01).bfloat16()
            if zeros:
                zero_points = torch.randint(0, 17, scales.shape, dtype=torch.uint8)
            plain = dequantize_w4(weight, scales, zero_points, torch.float64)
            spread = 16 * scales.double().repeat_interleave(group, dim=1)  # before zero points are taken off
        self.tiles, self.scales = prepack(weight), prepack_scales(scales)
        self.zero_points = None if zero_points is None else prepack_scales(zero_points)
        self.plain = plain.view(experts, outputs, inputs)
        self.spread = (plain.abs() + spread).view(experts, outputs, inputs)

    def arguments(self, x, bias, index) -> tuple[object, ...]:
        return x, self.tiles, self.scales, self.zero_points, bias, index, self.outputs

    def check(self, result: torch.Tensor, x, bias, index) -> None:
        """Each element within the roundings of an fp32 sum, and of a weight that is dequantized."""
        wide = None if bias is None else bias.double()
        exact = exact_linear(x.double(), self.plain, wide, index)
        products = exact_linear(x.double().abs(), self.spread, None if wide is None else wide.abs(), index)
        assert result.shape == exact.shape and result.dtype == x.dtype and result.is_contiguous()
        bound = 1.01 * UNIT[x.dtype] * exact.abs() + 16 * 2.0**-24 * products + 1e-30
        if index.numel() > 32:
            bound = bound + 2.1 * UNIT[x.dtype] * products
        assert bool(((result.double() - exact).abs() <= bound).all())


def tokens_of(count: int, slots: int, experts: int, inputs: int, dtype: torch.dtype, wide: bool):
    """x and an index in which some slots have no expert; ``wide``: x has one row a slot."""
    x = torch.randn(count, slots, inputs) if wide else torch.randn(count, inputs)
    return x.to(dtype), torch.randint(0, experts + 1, (count, slots))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_values(isa: str, form: str, dtype: torch.dtype) -> None:
    for outputs, inputs in ((16, 64), (48, 192), (80, 128)):
        layer = Layer(form, 5, outputs, inputs)
        for count, slots, wide in ((1, 3, False), (1, 2, True), (5, 2, True), (9, 3, False), (40, 2, False)):
            x, index = tokens_of(count, slots, 5, inputs, dtype, wide)
            bias = torch.randn(5, outputs).to(dtype) if count % 2 else None
            layer.check(op(*layer.arguments(x, bias, index)), x, bias, index)


@pytest.mark.parametrize("inputs", [1, 7, 63, 129])
def test_odd_inputs_of_8_bits(isa: str, inputs: int) -> None:
    layer = Layer("8 bits", 3, 32, inputs)
    x, index = tokens_of(6, 2, 3, inputs, torch.float32, False)
    layer.check(op(*layer.arguments(x, None, index)), x, None, index)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_rows_of_one_expert(isa: str, dtype: torch.dtype) -> None:
    """More than are packed together, and more than torch's product is the faster for."""
    layer = Layer("groups of 32", 2, 32, 64)
    for index in (torch.zeros(300, 1, dtype=torch.int64), torch.randint(0, 3, (150, 2))):
        x = torch.randn(len(index), 64).to(dtype)
        layer.check(op(*layer.arguments(x, None, index)), x, None, index)


def test_only_the_experts_named_are_read_and_none_gives_zeros(isa: str, native_only: None) -> None:
    layer = Layer("8 bits", 4, 16, 64)
    x = torch.randn(3, 64)
    index = torch.tensor([[0, 2], [4, 2], [0, 4]])
    expected = op(*layer.arguments(x, None, index))
    layer.scales[1], layer.scales[3] = float("nan"), float("nan")
    found = op(*layer.arguments(x, None, index))
    assert torch.equal(found, expected) and bool((found[index == 4] == 0).all())


@pytest.mark.parametrize("form", FORMS)
def test_the_number_of_threads_changes_no_bit(native_only: None, form: str) -> None:
    layer = Layer(form, 8, 272, 256)
    threads = torch.get_num_threads()
    try:
        for count in (1, 20):
            x, index = tokens_of(count, 4, 8, 256, torch.bfloat16, False)
            results = []
            for many in (1, 2, 3):
                torch.set_num_threads(many)
                results.append(op(*layer.arguments(x, None, index)))
            assert all(torch.equal(results[0], other) for other in results[1:])
    finally:
        torch.set_num_threads(threads)


def test_strides() -> None:
    layer = Layer("groups of 32", 3, 16, 64)
    x, index = tokens_of(6, 2, 3, 64, torch.float32, False)
    bias = torch.randn(3, 16)
    expected = op(*layer.arguments(x, bias, index))
    strided = op(
        *layer.arguments(x.t().contiguous().t(), bias.t().contiguous().t(), index.t().contiguous().t())
    )
    assert torch.equal(strided, expected)
    wide = x[:, None].expand(6, 2, 64)
    assert torch.equal(op(*layer.arguments(wide, bias, index)), expected)


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0)])
def test_nothing_to_do(sizes: tuple[int, int]) -> None:
    layer = Layer("8 bits", 2, 16, 8)
    x, index = torch.randn(sizes[0], 8), torch.zeros(sizes, dtype=torch.int64)
    assert op(*layer.arguments(x, None, index)).shape == (*sizes, 16)


@pytest.mark.parametrize("form", FORMS)
def test_opcheck_and_reference(form: str) -> None:
    layer = Layer(form, 3, 16, 64)
    for count, wide in ((0, False), (1, False), (5, True)):
        x, index = tokens_of(count, 2, 3, 64, torch.float32, wide)
        bias = torch.randn(3, 16)
        torch.library.opcheck(op.default, layer.arguments(x, bias, index))
        layer.check(reference(*layer.arguments(x, bias, index)), x, bias, index)


X, INDEX = torch.zeros(2, 64), torch.zeros(2, 1, dtype=torch.int64)
T8, S8 = torch.zeros(4, 16, 64, dtype=torch.int8), torch.ones(4, 1, 16)
T4, S4 = torch.zeros(4, 8, 64, dtype=torch.uint8), torch.ones(4, 2, 16)
Z4 = torch.zeros(4, 2, 16, dtype=torch.uint8)
BAD = {
    "index dims": ((X, T8, S8, None, None, INDEX[0], 32), ValueError, r"index must have shape .*got \[1\]"),
    "index dtype": ((X, T8, S8, None, None, INDEX.int(), 32), TypeError, r"index must be int64, got"),
    "x dims": ((X[0], T8, S8, None, None, INDEX, 32), ValueError, r"x must have shape .*got \[64\]"),
    "x tokens": ((X[:1], T8, S8, None, None, INDEX, 32), ValueError, r"x must have tokens = 2 first"),
    "x slots": (
        (X[:, None].expand(2, 3, 64), T8, S8, None, None, INDEX, 32),
        ValueError,
        r"slots = 1 second",
    ),
    "x size": ((X[:, 32:], T8, S8, None, None, INDEX, 32), ValueError, r"x must have in_features last"),
    "x dtype": ((X.int(), T8, S8, None, None, INDEX, 32), TypeError, r"x must be float32, bfloat16 or"),
    "tiles dtype": ((X, T8.int(), S8, None, None, INDEX, 32), TypeError, r"tiles must be int8 or uint8, got"),
    "tiles shape": ((X, T8[..., :8], S8, None, None, INDEX, 32), ValueError, r"tiles must have shape"),
    "outputs": ((X, T8, S8, None, None, INDEX, 24), ValueError, r"out_features must be those .*got 24"),
    "experts": ((X, T8, S8, None, None, INDEX, 48), ValueError, r"out_features must be those .*got 48"),
    "scales": ((X, T8, S8[0], None, None, INDEX, 32), ValueError, r"scales must have shape .*got \[1, 16\]"),
    "zeros": ((X, T8, S8, Z4[:, :1], None, INDEX, 32), ValueError, r"zero_points are for tiles of 4 bits"),
    "zeros dtype": ((X, T4, S4, Z4.int(), None, INDEX, 32), TypeError, r"zero_points must be uint8, got"),
    "zeros shape": ((X, T4, S4, Z4[:2], None, INDEX, 32), ValueError, r"zero_points must have .*scales"),
    "bias": ((X, T8, S8, None, torch.zeros(2, 16), INDEX, 32), ValueError, r"bias must have .*\[2, 32\]"),
    "bias dtype": ((X, T8, S8, None, torch.zeros(2, 32).half(), INDEX, 32), TypeError, r"bias must .*dtype"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments(name: str) -> None:
    arguments, error, text = BAD[name]
    for call in (op, reference):
        with pytest.raises(error, match=text):
            call(*arguments)


@pytest.mark.parametrize("number", [-1, 3])
def test_experts_that_do_not_exist(number: int) -> None:
    index = torch.full((2, 1), number)
    for call, error in ((op, IndexError), (reference, ExpertIndexError)):
        with pytest.raises(error, match=f"index must be 0 .. 2 for 2 experts .*got {number}"):
            call(X, T8, S8, None, None, index, 32)
