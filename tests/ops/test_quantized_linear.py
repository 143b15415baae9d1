"""`linear_packed` of 8 and 4 bits against float64, at every instruction set, layout, row count."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from liteboost_adaptor.ops import ops
from liteboost_adaptor.ops.quantized_linear import (
    dequantize_w4,
    dequantize_w8,
    pack_w4,
    prepack,
    prepack_scales,
    unpack,
    unpack_scales,
    unpack_w4,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
W4_FORMS = [(32, False), (32, True), (64, False), (128, True)]
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def w8(n: int, k: int, scale_dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    return {"weight": weight, "scales": (torch.rand(n) * 0.01 + 0.001).to(scale_dtype)}


def w4(
    n: int, k: int, group: int, zeros: bool, scale_dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    layer = {
        "weight": pack_w4(torch.randint(0, 16, (n, k), dtype=torch.uint8)),
        "scales": (torch.rand(n, k // group) * 0.1 + 0.01).to(scale_dtype),
    }
    if zeros:
        layer["zero_points"] = torch.randint(0, 17, (n, k // group), dtype=torch.uint8)
    return layer


def packed(layer: dict[str, torch.Tensor]) -> list[torch.Tensor | None]:
    """``layer`` as `linear_packed` takes it: tiles, scales, zero points."""
    zeros = layer.get("zero_points")
    tiles = prepack(layer["weight"]), prepack_scales(layer["scales"])
    return [*tiles, None if zeros is None else prepack_scales(zeros)]


def run(x: torch.Tensor, layer: dict[str, torch.Tensor], bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.ops.liteboost.linear_packed(x, *packed(layer), bias, len(layer["weight"]))


def reference(x: torch.Tensor, layer: dict[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
    return ops()["linear_packed"].reference(x, *packed(layer), bias, len(layer["weight"]))


def check(
    x: torch.Tensor, layer: dict[str, torch.Tensor], bias: torch.Tensor | None = None, given: object = None
) -> torch.Tensor:
    """Each element of ``given``, or of the op's result, within the roundings that the op's order has."""
    result = run(x, layer, bias) if given is None else given
    dequantize = dequantize_w8 if layer["weight"].dtype == torch.int8 else dequantize_w4
    weight = dequantize(**layer, dtype=torch.float64)
    exact = F.linear(x.double(), weight, None if bias is None else bias.double())
    assert result.shape == exact.shape and result.dtype == x.dtype and result.is_contiguous()
    products = F.linear(x.double().abs(), weight.abs(), None if bias is None else bias.double().abs())
    unit = UNIT[x.dtype]
    if "zero_points" in layer:  # what is summed before the zero point is taken off
        spread = (
            layer["scales"].double().abs().repeat_interleave(x.shape[-1] // layer["scales"].shape[1], dim=1)
        )
        products = products + F.linear(x.double().abs(), 16 * spread)
    bound = 1.01 * unit * exact.abs() + 8 * 2.0**-24 * products + 1e-30
    if x.shape[:-1].numel() > 32:  # the weight is rounded, each element once
        bound = bound + unit * products
    assert ((result.double() - exact).abs() <= bound).all()
    return result


def inputs(rows: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, k).to(dtype), torch.randn(n).to(dtype)


def test_packing_is_the_one_that_is_documented() -> None:
    integers = torch.randint(0, 16, (3, 96), dtype=torch.uint8)
    packed = pack_w4(integers)
    assert packed.shape == (3, 48) and torch.equal(unpack_w4(packed), integers)
    words = packed[1, 16:32].view(torch.int16).to(torch.int32) & 0xFFFF
    for i in range(8):
        for j in range(4):
            assert words[i] >> 4 * j & 15 == integers[1, 32 + 8 * j + i]


@pytest.mark.parametrize("n", [1, 16, 37])
def test_tiles_are_those_that_are_documented_and_come_back(n: int) -> None:
    integers = torch.randint(0, 16, (n, 96), dtype=torch.uint8)
    packed, bytes_ = pack_w4(integers), torch.randint(-128, 128, (n, 43), dtype=torch.int8)
    nibbles, columns = prepack(packed), prepack(bytes_)
    assert nibbles.shape == (-(-n // 16), 12, 64) and columns.shape == (-(-n // 16), 16, 64)
    row, column = n - 1, 42
    words = columns.view(-1, 16, 16, 4)
    assert words[row // 16, column // 4, row % 16, column % 4] == bytes_[row, column]
    assert not words[:, 11:].any() and not words[:, 10, :, 3].any()
    # The third pack's second four bytes are words 2 and 3: columns 64 + 8 * j + 2 and 3.
    four = nibbles[row // 16, 9, 4 * (row % 16) : 4 * (row % 16) + 4].tolist()
    for j in range(4):
        assert four[j // 2] >> 4 * (j % 2) & 15 == integers[row, 64 + 8 * j + 2]
        assert four[2 + j // 2] >> 4 * (j % 2) & 15 == integers[row, 64 + 8 * j + 3]
    assert torch.equal(unpack(nibbles, n, 96), packed) and torch.equal(unpack(columns, n, 43), bytes_)
    scales = torch.randn(n, 3)
    assert prepack_scales(scales).shape == (-(-n // 16), 3, 16)
    assert torch.equal(unpack_scales(prepack_scales(scales), n), scales)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 20, 40])
def test_tiles_of_8_bits_with_groups(isa: str, dtype: torch.dtype, rows: int) -> None:
    layer, scales = w8(21, 192), torch.rand(21, 3) * 0.01 + 0.001
    x, bias = inputs(rows, 21, 192, dtype)
    result = torch.ops.liteboost.linear_packed(
        x, prepack(layer["weight"]), prepack_scales(scales), None, bias, 21
    )
    weight = layer["weight"].double() * scales.double().repeat_interleave(64, dim=1)
    exact = F.linear(x.double(), weight, bias.double())
    products = F.linear(x.double().abs(), weight.abs(), bias.double().abs())
    bound = 1.01 * UNIT[dtype] * exact.abs() + 8 * 2.0**-24 * products
    if rows > 32:
        bound = bound + UNIT[dtype] * products
    assert ((result.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 1000])
def test_w8_at_every_length(isa: str, dtype: torch.dtype, k: int) -> None:
    for n in (1, 7, 66):
        for rows in (1, 3, 6):
            x, bias = inputs(rows, n, k, dtype)
            check(x, w8(n, k), bias if n != 7 else None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("group", "zeros"), W4_FORMS)
def test_w4_at_every_length(isa: str, dtype: torch.dtype, group: int, zeros: bool) -> None:
    for groups in (1, 2, 3, 5, 8):
        for n in (1, 7, 66):
            for rows in (1, 3, 6):
                x, bias = inputs(rows, n, group * groups, dtype)
                check(x, w4(n, group * groups, group, zeros), bias if n != 7 else None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_of_rows_and_blocks_of_columns(isa: str, dtype: torch.dtype) -> None:
    layers = [w8(70, 2080), w4(70, 2080, 32, True)]
    for rows in [*range(1, 19), 32, 33, 70]:
        x, bias = inputs(rows, 70, 2080, dtype)
        for layer in layers:
            check(x, layer, bias)


@pytest.mark.parametrize("rows", [1, 5])
def test_more_columns_than_a_block_of_scales(isa: str, rows: int) -> None:
    for dtype in DTYPES:
        x, _ = inputs(rows, 5, 8192 + 544, dtype)
        check(x, w8(5, 8192 + 544))
        check(x, w4(5, 8192 + 544, 32, True))


@pytest.mark.parametrize("scale_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 4, 40, 2100])
def test_scales_of_every_dtype(isa: str, scale_dtype: torch.dtype, rows: int) -> None:
    for dtype in DTYPES:
        x, _ = inputs(rows, 37, 320, dtype)
        check(x, w8(37, 320, scale_dtype))
        check(x, w4(37, 320, 32, True, scale_dtype))
        check(x, w4(37, 320, 64, False, scale_dtype))


@pytest.mark.parametrize("rows", [1, 6, 50])
def test_w8_of_integers_is_exact(isa: str, rows: int) -> None:
    # Sums that fp32 has exactly: another integer, scale or column than the right one would show.
    x = torch.randint(-3, 4, (rows, 96)).float()
    for layer in (w8(33, 96), w4(33, 96, 32, True)):
        layer["scales"] = 2.0 ** torch.randint(-2, 3, layer["scales"].shape)
        dequantize = dequantize_w8 if layer["weight"].dtype == torch.int8 else dequantize_w4
        expected = x @ dequantize(**layer).t()
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert torch.equal(run(x.to(dtype), layer), expected.to(dtype))


@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 3, 64), (2, 0, 64), (5, 7, 64)])
def test_leading_dimensions(shape: tuple[int, ...]) -> None:
    for layer in (w8(10, 64), w4(10, 64, 32, True)):
        check(torch.randn(shape), layer, torch.randn(10))


@pytest.mark.parametrize("rows", [1, 4, 18, 40])
def test_views(isa: str, rows: int) -> None:
    for layer in (w8(40, 64), w4(40, 64, 32, True)):
        x, bias = inputs(rows, 40, 64, torch.bfloat16)
        expected = run(x, layer, bias)
        host = torch.full((rows + 2, 71), float("nan"), dtype=x.dtype)
        host[1:-1, 3:67] = x
        assert torch.equal(run(host[1:-1, 3:67], layer, bias), expected)
        assert torch.equal(run(x.t().contiguous().t(), layer, bias), expected)
        assert torch.equal(run(x, layer, bias.repeat_interleave(2)[::2]), expected)
        tensors = packed(layer)
        views = [None if t is None else torch.cat([t, t], dim=-1)[..., : t.shape[-1]] for t in tensors]
        assert torch.equal(torch.ops.liteboost.linear_packed(x, *views, bias, 40), expected)


@pytest.mark.parametrize("rows", [0, 1, 40])
def test_nothing_to_multiply(rows: int) -> None:
    x, bias = torch.randn(rows, 0), torch.randn(6)
    empty = {"weight": torch.zeros(6, 0, dtype=torch.uint8), "scales": torch.ones(6, 1)}
    for layer in (w8(6, 0), empty):
        assert torch.equal(run(x, layer), torch.zeros(rows, 6))
        assert torch.equal(run(x, layer, bias), bias.expand(rows, 6))
    assert run(torch.randn(rows, 64), w8(0, 64)).shape == (rows, 0)


def test_blocks_of_rows_and_of_columns_change_no_bit(native_only: None) -> None:
    threads = torch.get_num_threads()
    for n, k, rows in ((40, 64, 700), (70, 4256, 100)):
        x, bias = inputs(rows, n, k, torch.bfloat16)
        for layer in (w8(n, k), w4(n, k, 32, True)):
            check(x, layer, bias)
            try:
                torch.set_num_threads(1)
                expected = run(x, layer, bias)
                torch.set_num_threads(3)
                assert torch.equal(run(x, layer, bias), expected)
            finally:
                torch.set_num_threads(threads)


@pytest.mark.parametrize("rows", [1, 5, 16, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_number_of_threads_changes_no_bit(native_only: None, dtype: torch.dtype, rows: int) -> None:
    threads = torch.get_num_threads()
    x, bias = inputs(rows, 1037, 512, dtype)
    for layer in (w8(1037, 512), w4(1037, 512, 64, True)):
        try:
            results = []
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                results.append(run(x, layer, bias))
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def at_once(x: torch.Tensor, layers: list[dict[str, torch.Tensor]], biases: list) -> list[torch.Tensor]:
    """What programs run for several layers with one input."""
    lists = [list(each) for each in zip(*map(packed, layers), strict=True)]
    return torch.ops.liteboost._linears_packed(x, *lists, biases, [len(each["weight"]) for each in layers])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 5, 40])
def test_several_at_once_give_the_bits_of_each(
    isa: str, native_only: None, dtype: torch.dtype, rows: int
) -> None:
    alike8 = [w8(n, 96) for n in (37, 16, 1)]
    alike4 = [w4(n, 96, 32, True) for n in (37, 16, 130)]
    mixed = [w8(5, 96), w4(40, 96, 32, False), w4(16, 96, 96, False), w4(16, 96, 32, True), w8(0, 96)]
    for layers in (alike8, alike4, mixed, alike8[:1]):
        x = torch.randn(1, rows, 96).to(dtype)
        biases = [
            torch.randn(len(each["weight"])).to(dtype) if i % 2 else None for i, each in enumerate(layers)
        ]
        for layer, bias, result in zip(layers, biases, at_once(x, layers, biases), strict=True):
            assert torch.equal(result, run(x, layer, bias))
    strided = [torch.randn(74).to(dtype)[::2], None, None]
    x = torch.randn(rows, 192).to(dtype)[:, ::2]
    for layer, bias, result in zip(alike8, strided, at_once(x, alike8, strided), strict=True):
        assert torch.equal(result, run(x, layer, bias))


def test_several_at_once_are_shared_out_over_any_number_of_threads(native_only: None) -> None:
    threads, x = torch.get_num_threads(), torch.randn(1, 512).bfloat16()
    layers = [w4(n, 512, 32, False) for n in (2048, 1024, 1024, 16)]
    expected = [run(x, layer) for layer in layers]
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert all(map(torch.equal, at_once(x, layers, [None] * 4), expected))
    finally:
        torch.set_num_threads(threads)


def test_several_at_once_refuse_lists_that_do_not_fit(native_only: None) -> None:
    x, layer = torch.randn(1, 64), w8(24, 64)
    with pytest.raises(ValueError, match=r"one element for each layer.* got 1 tiles.* 2 biases"):
        at_once(x, [layer], [None, None])
    with pytest.raises(ValueError, match="at least one"):
        torch.ops.liteboost._linears_packed(x, [], [], [], [], [])
    with pytest.raises(ValueError, match=r"out_features must .*got 40"):
        tiles, scales, zeros = packed(layer)
        torch.ops.liteboost._linears_packed(x, [tiles], [scales], [zeros], [None], [40])
    with pytest.raises(ValueError, match="linear_packed"):
        at_once(x[:, :32], [layer], [None])


@pytest.mark.parametrize("rows", [1, 6])
def test_nan_and_infinity_stay_in_their_output(isa: str, native_only: None, rows: int) -> None:
    for layer in (w8(21, 64), w4(21, 64, 32, False)):
        x, bias = inputs(rows, 21, 64, torch.bfloat16)
        clean = run(x, layer, bias)
        layer["scales"][4] = float("nan")
        result = run(x, layer, bias)
        others = [n for n in range(21) if n != 4]
        assert result[:, 4].isnan().all() and torch.equal(result[:, others], clean[:, others])


@pytest.mark.parametrize("kind", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_what_is_not_finite_stays_in_its_row(isa: str, native_only: None, kind: float) -> None:
    for rows in (1, 3, 6):
        for layer in (w8(21, 64), w4(21, 64, 32, False)):
            x, bias = inputs(rows, 21, 64, torch.bfloat16)
            clean = run(x, layer, bias)
            x[-1, 40] = kind
            result = run(x, layer, bias)
            assert torch.equal(result[:-1], clean[:-1]) and not result[-1].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_what_is_not_finite_is_that_of_the_weight_multiplied_out(
    isa: str, dtype: torch.dtype, kind: float
) -> None:
    for rows in (1, 3, 6, 40):
        for layer in (w8(37, 64), w4(37, 64, 32, True)):
            x, bias = inputs(rows, 37, 64, dtype)
            x[0, 40] = kind
            scales = layer["scales"].clone()
            scales.view(-1)[9] = kind
            for given in (layer, {**layer, "scales": scales}):
                expected, found = reference(x, given, bias), run(x, given, bias)
                for is_so in (torch.isnan, torch.isposinf, torch.isneginf):
                    assert torch.equal(is_so(found), is_so(expected))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 4, 40])
def test_opcheck(dtype: torch.dtype, rows: int) -> None:
    x, bias = inputs(rows, 24, 64, dtype)
    for given in (None, bias):
        for layer in (w8(24, 64), w4(24, 64, 32, False), w4(24, 64, 32, True)):
            args = (x.reshape(-1, 1, 64), *packed(layer), given, 24)
            torch.library.opcheck(torch.ops.liteboost.linear_packed.default, args)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_references(dtype: torch.dtype) -> None:
    x, bias = inputs(5, 9, 96, dtype)
    for layer in (w8(9, 96), w4(9, 96, 32, True)):
        check(x, layer, bias, reference(x, layer, bias))


def test_compiles_whole() -> None:
    x, op = torch.randn(2, 64), torch.ops.liteboost.linear_packed
    for layer in (w8(24, 64), w4(24, 64, 32, True)):
        tensors = packed(layer)
        compiled = torch.compile(
            lambda x, tensors=tensors: op(x, *tensors, None, 24) + 1, fullgraph=True, backend="aot_eager"
        )
        assert torch.equal(compiled(x), op(x, *tensors, None, 24) + 1)


X, T8, S1 = torch.zeros(2, 64), torch.zeros(1, 16, 64, dtype=torch.int8), torch.ones(1, 1, 16)
T4, S2 = torch.zeros(1, 8, 64, dtype=torch.uint8), torch.ones(1, 2, 16)
Z1, Z2 = (torch.zeros(1, groups, 16, dtype=torch.uint8) for groups in (1, 2))
#: Arguments, the error's kind, and what it says behind the op.
BAD = {
    "dtype": ((X, T8.int(), S1, None, None, 4), TypeError, r"tiles must be int8 or uint8"),
    "w8": ((X, T8[..., :8], S1, None, None, 4), ValueError, r"tiles must have shape .*up to 32 / 4, 64\]"),
    "w4": ((X, T4[:, :6], S1, None, None, 4), ValueError, r"tiles must have .*of 32, got"),
    "dims": ((X, T8[0], S1, None, None, 4), ValueError, r"tiles must have shape .*got \[16, 64\]"),
    "outputs": ((X, T8, S1, None, None, 17), ValueError, r"out_features must .*got 17"),
    "scalar": ((torch.tensor(1.0), T8, S1, None, None, 4), ValueError, r"x must have .*got a scalar"),
    "x of w8": ((X[:, 32:], T8, S1, None, None, 4), ValueError, r"x must have .*got \[2, 32\]"),
    "x of w4": ((X[:, 8:], T4, S1, None, None, 4), ValueError, r"x must have .*got \[2, 56\]"),
    "x dtype": ((X.int(), T8, S1, None, None, 4), TypeError, r"x must be float32, bfloat16 or float16, got"),
    "scales": ((X, T4, S1[0], None, None, 4), ValueError, r"scales must have shape .*got \[1, 16\]"),
    "groups": (
        (X, T8, torch.ones(1, 4, 16), None, None, 4),
        ValueError,
        r"scales must have shape .*got \[1, 4, 16\]",
    ),
    "scales dtype": (
        (X, T8, S1.int(), None, None, 4),
        TypeError,
        r"scales must be float32, bfloat16 or float16",
    ),
    "scales device": (
        (X, T8, S1.to("meta"), None, None, 4),
        ValueError,
        r"scales must be on the device of x",
    ),
    "zeros of w8": ((X, T8, S1, Z1, None, 4), ValueError, r"zero_points are for tiles of 4 bits"),
    "zeros dtype": ((X, T4, S2, Z2.int(), None, 4), TypeError, r"zero_points must be uint8, got"),
    "zeros shape": ((X, T4, S2, Z1, None, 4), ValueError, r"zero_points must have the shape of scales"),
    "bias": (
        (X, T8, S1, None, torch.zeros(5), 4),
        ValueError,
        r"bias must have shape .*= \[4\], got \[5\]",
    ),
    "bias dtype": (
        (X, T8, S1, None, torch.zeros(4).half(), 4),
        TypeError,
        r"bias must have the dtype of x",
    ),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("way", ["op", "reference"])
def test_errors_name_op_and_argument(case: str, way: str) -> None:
    args, kind, text = BAD[case]
    call = torch.ops.liteboost.linear_packed if way == "op" else ops()["linear_packed"].reference
    with pytest.raises(kind, match=r"liteboost::linear_packed: " + text):
        call(*args)


@pytest.mark.parametrize("rows", [2, 40])
def test_no_backward_is_an_error_in_grad_mode_only(rows: int) -> None:
    x = torch.randn(rows, 64, requires_grad=True)
    for layer in (w8(4, 64), w4(4, 64, 32, False)):
        with pytest.raises(RuntimeError, match=r"has no backward, but (an argument|x) requires grad"):
            run(x, layer)
        with torch.no_grad():
            assert not run(x, layer).requires_grad
