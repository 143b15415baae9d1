"""`linear_w8a8` against float64 on the very integers, at every instruction set, layout and number of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from liteboost_adaptor.ops import ops
from liteboost_adaptor.ops.int8_linear import quantize_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

op = torch.ops.liteboost.linear_w8a8
reference = ops()["linear_w8a8"].reference


def layer(n: int, k: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(-128, 128, (n, k), dtype=torch.int8), (torch.rand(n) * 0.01 + 0.001).to(dtype)


def inputs(rows: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, k).to(dtype), torch.randn(n).to(dtype)


def check(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Bits of the reference; and that within its roundings of the dequantized product in float64."""
    result, expected = op(x, weight, scales, bias), reference(x, weight, scales, bias)
    assert result.shape == expected.shape and result.dtype == x.dtype and result.is_contiguous()
    assert torch.equal(result, expected)
    integers, row_scales = quantize_rows(x)
    exact = F.linear(
        integers.double() * row_scales.double(),
        weight.double() * scales.double()[:, None],
        None if bias is None else bias.double(),
    )
    bound = 1.01 * UNIT[x.dtype] * exact.abs() + 4 * 2.0**-24 * (
        exact.abs() + (bias.abs() if bias is not None else 0)
    )
    assert (
        (result.double() - exact).abs() <= bound + 2.0**-126 + (2.0**-24 if x.dtype == torch.float16 else 0)
    ).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 1000])
def test_every_length(isa: str, dtype: torch.dtype, k: int) -> None:
    for n in (1, 3, 7, 16, 66):
        for rows in (1, 3, 6, 23):
            x, bias = inputs(rows, n, k, dtype)
            check(x, *layer(n, k), bias if n != 7 else None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_of_rows(isa: str, dtype: torch.dtype) -> None:
    given = layer(150, 584)
    for rows in [*range(1, 40), 64, 129, 300]:
        x, bias = inputs(rows, 150, 584, dtype)
        check(x, *given, bias)


def test_integers_are_the_nearest_and_the_largest_magnitude_is_127() -> None:
    for dtype in DTYPES:
        x = (torch.randn(50, 333) * torch.logspace(-3, 3, 50)[:, None]).to(dtype)
        integers, scales = quantize_rows(x)
        assert (integers.abs().amax(-1) == 127).all() and scales.shape == (50, 1)
        assert ((integers * scales - x.float()).abs() <= 0.50001 * scales).all()


def test_largest_sums_do_not_overflow(isa: str) -> None:
    x = torch.ones(2, 131072)
    x[1] = -1
    weight, scales = torch.full((3, 131072), -128, dtype=torch.int8), torch.ones(3)
    for rows in (x, x.repeat(10, 1)):
        expected = (
            torch.tensor([-128.0 * 131072, 128.0 * 131072]).repeat(len(rows) // 2)[:, None].expand(-1, 3)
        )
        torch.testing.assert_close(op(rows, weight, scales), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rows", [2, 40])
def test_rows_of_zeros_of_little_and_of_what_is_no_number(isa: str, rows: int) -> None:
    given = layer(20, 70)
    x = torch.randn(rows, 70)
    clean = op(x, *given)
    x[0] = 0
    assert torch.equal(op(x, *given)[0], torch.zeros(20)) and torch.equal(op(x, *given)[1:], clean[1:])
    for value in (float("nan"), float("inf"), float("-inf")):
        x[0, 69] = value
        result = op(x, *given)
        assert result[0].isnan().all() and torch.equal(result[1:], clean[1:])
        assert reference(x, *given)[0].isnan().all()
    for size in (1e-30, 1e-31, 1e-38, 1e-44, 1e36, 1e37):
        x[0] = torch.rand(70) * size
        check(x, *given, None)


@pytest.mark.parametrize("scale_dtype", DTYPES, ids=str)
def test_scales_of_every_dtype(isa: str, scale_dtype: torch.dtype) -> None:
    for rows in (1, 40):
        x, bias = inputs(rows, 37, 320, torch.bfloat16)
        check(x, *layer(37, 320, scale_dtype), bias)


@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 3, 64), (2, 0, 64), (5, 7, 64)])
def test_leading_dimensions(shape: tuple[int, ...]) -> None:
    check(torch.randn(shape), *layer(10, 64), torch.randn(10))


@pytest.mark.parametrize("rows", [1, 4, 18, 40])
def test_views(isa: str, rows: int) -> None:
    weight, scales = layer(40, 64)
    x, bias = inputs(rows, 40, 64, torch.bfloat16)
    expected = op(x, weight, scales, bias)
    host = torch.full((rows + 2, 71), float("nan"), dtype=x.dtype)
    host[1:-1, 3:67] = x
    assert torch.equal(op(host[1:-1, 3:67], weight, scales, bias), expected)
    assert torch.equal(op(x.t().contiguous().t(), weight, scales, bias), expected)
    assert torch.equal(op(x, weight, scales.repeat(2)[:40], bias.repeat_interleave(2)[::2]), expected)
    assert torch.equal(op(x, torch.cat([weight, weight], 1)[:, :64], scales, bias), expected)


@pytest.mark.parametrize("rows", [0, 1, 40])
def test_nothing_to_multiply(rows: int) -> None:
    x, bias = torch.randn(rows, 0), torch.randn(6)
    assert torch.equal(op(x, *layer(6, 0)), torch.zeros(rows, 6))
    assert torch.equal(op(x, *layer(6, 0), bias), bias.expand(rows, 6))
    assert op(torch.randn(rows, 64), *layer(0, 64)).shape == (rows, 0)
    assert torch.equal(reference(x, *layer(6, 0), bias), bias.expand(rows, 6))


@pytest.mark.parametrize("rows", [1, 5, 16, 40, 500])
def test_the_number_of_threads_changes_no_bit(native_only: None, rows: int) -> None:
    threads = torch.get_num_threads()
    x, bias = inputs(rows, 1037, 512, torch.bfloat16)
    given = layer(1037, 512)
    try:
        results = []
        for count in (1, 2, 3, 40):
            torch.set_num_threads(count)
            results.append(op(x, *given, bias))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 40])
def test_opcheck(dtype: torch.dtype, rows: int) -> None:
    x, bias = inputs(rows, 24, 64, dtype)
    for given in (None, bias):
        torch.library.opcheck(op.default, (x, *layer(24, 64), given))


def test_compiles_whole() -> None:
    x, given = torch.randn(2, 64), layer(24, 64)
    compiled = torch.compile(lambda x: op(x, *given) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), op(x, *given) + 1)


X, W, S = torch.zeros(2, 64), torch.zeros(4, 64, dtype=torch.int8), torch.ones(4)
BAD = {
    "scalar": ((torch.tensor(1.0), W, S), ValueError, r"x must have .*got a scalar"),
    "x size": ((X[:, 1:], W, S), ValueError, r"x must have .*in_features = 64.*got \[2, 63\]"),
    "x dtype": ((X.int(), W, S), TypeError, r"x must be float32, bfloat16 or float16, got"),
    "weight dtype": ((X, W.float(), S), TypeError, r"weight must be int8, got"),
    "weight dims": ((X, W[0], S), ValueError, r"weight must have shape .*got \[64\]"),
    "columns": (
        (torch.zeros(1, 131073), torch.zeros(1, 131073, dtype=torch.int8), S[:1]),
        ValueError,
        r"weight must have at most 131072 columns.*got \[1, 131073\]",
    ),
    "scales": ((X, W, S[:3]), ValueError, r"scales must have shape .*= \[4\], got \[3\]"),
    "scales dtype": ((X, W, S.int()), TypeError, r"scales must be float32, bfloat16 or"),
    "scales device": ((X, W, S.to("meta")), ValueError, r"scales must be on the device of x"),
    "bias": ((X, W, S, torch.zeros(5)), ValueError, r"bias must have shape .*= \[4\], got \[5\]"),
    "bias dtype": ((X, W, S, S.half()), TypeError, r"bias must have the dtype of x"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("call", [op, reference], ids=["op", "reference"])
def test_errors_name_op_and_argument(case: str, call: object) -> None:
    args, kind, text = BAD[case]
    with pytest.raises(kind, match=r"liteboost::linear_w8a8: " + text):
        call(*args)


@pytest.mark.parametrize("rows", [2, 40])
def test_no_backward_is_an_error_in_grad_mode_only(rows: int) -> None:
    x = torch.randn(rows, 64, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"has no backward, but (an argument|x) requires grad"):
        op(x, *layer(4, 64))
    with torch.no_grad():
        assert not op(x, *layer(4, 64)).requires_grad


def at_once(x: torch.Tensor, layers: list[tuple], biases: list[torch.Tensor | None]) -> list[torch.Tensor]:
    """What programs run for several layers with one input."""
    return torch.ops.liteboost._linears_w8a8(x, *map(list, zip(*layers, strict=True)), biases)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 4, 5, 40, 150])
def test_several_at_once_give_the_bits_of_each(
    isa: str, native_only: None, dtype: torch.dtype, rows: int
) -> None:
    x = torch.randn(1, rows, 200).to(dtype)
    layers = [layer(n, 200, of) for n, of in ((37, dtype), (16, torch.float32), (0, dtype), (300, dtype))]
    layers.append((layer(400, 30)[0].T[:, ::2], torch.rand(60)[::2]))
    biases = [None, torch.randn(32).to(dtype)[::2], None, torch.randn(300).to(dtype), None]
    for each, of, bias in zip(at_once(x, layers, biases), layers, biases, strict=True):
        assert torch.equal(each, op(x, *of, bias)) and each.is_contiguous()
    turned = torch.randn(200, rows).to(dtype).T
    for each, of in zip(at_once(turned, layers, [None] * 5), layers, strict=True):
        assert torch.equal(each, op(turned, *of))
    for each in at_once(x[..., :0], [(weight[:, :0], scales) for weight, scales in layers], [None] * 5):
        assert not each.any()


def test_several_at_once_are_shared_out_over_any_number_of_threads(native_only: None) -> None:
    threads, layers = torch.get_num_threads(), [layer(n, 512) for n in (2048, 1023, 16)]
    try:
        for rows in (1, 6, 150):
            x = torch.randn(rows, 512).bfloat16()
            expected = [op(x, *each) for each in layers]
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                assert all(map(torch.equal, at_once(x, layers, [None] * 3), expected))
    finally:
        torch.set_num_threads(threads)


def test_several_at_once_refuse_lists_that_do_not_fit(native_only: None) -> None:
    x, given = torch.randn(1, 64), layer(24, 64)
    with pytest.raises(ValueError, match=r"one element for each layer.* got 1 weights.* 2 biases"):
        at_once(x, [given], [None, None])
    with pytest.raises(ValueError, match="at least one"):
        torch.ops.liteboost._linears_w8a8(x, [], [], [])
    with pytest.raises(ValueError, match="scales"):
        at_once(x, [(given[0], given[1][1:])], [None])
