"""`quantize_kv` and `int8_attention` against float64 of the very integers, at every instruction set."""

from __future__ import annotations

import pytest
import torch
from support.attention_cases import (
    DTYPES,
    MASKS,
    NAN,
    SHAPES,
    double,
    eager,
    make,
    make_mask,
    make_sinks,
    one_thread,
)
from torch import Tensor

from liteboost_adaptor.ops import ops
from liteboost_adaptor.ops.int8_attention import dequantized

__all__ = ["one_thread"]  # applies by being here

attention = torch.ops.liteboost.int8_attention
quantize_kv = torch.ops.liteboost.quantize_kv
reference = ops()["int8_attention"].reference
rows_reference = ops()["quantize_kv"].reference


def check(query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Within what roundings explain of float64 over the values that the integers stand for."""
    result = attention(query, key, value, *args, **kwargs)
    wide = [double(arg) for arg in args], {name: double(arg) for name, arg in kwargs.items()}
    keys, values = dequantized(key, torch.float64), dequantized(value, torch.float64)
    assert result.shape == (query.shape[0], query.shape[2], query.shape[1], values.shape[3])
    assert result.dtype == query.dtype and result.is_contiguous()
    if not result.numel() or not key.shape[2]:
        assert not result.any()
        return result
    exact = eager(query.double(), keys, values, *wide[0], **wide[1])
    unit, largest = torch.finfo(query.dtype).eps, values.abs().max()
    assert ((result.double() - exact).abs() <= unit * (exact.abs() + largest) + 2e-6 * largest).all()
    # As a whole half of a rounding: probabilities and outputs are rounded by themselves, not all one way.
    assert (result.double() - exact).norm() <= (0.5 * unit + 5e-7) * exact.abs().add(largest / 8).norm()
    return result


def states(*size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = make(*size, dtype)
    return query, quantize_kv(key), quantize_kv(value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1, 3, 7, 8, 15, 16, 17, 31, 33, 64, 100, 128, 129, 256])
def test_rows_are_the_nearest_integers_and_the_same_bits_everywhere(
    isa: str, dtype: torch.dtype, dim: int
) -> None:
    x = (torch.randn(3, 2, 40, dim) * torch.logspace(-3, 3, 40)[:, None]).to(dtype)
    rows = quantize_kv(x)
    assert rows.shape == (3, 2, 40, dim + 4) and rows.dtype == torch.int8 and rows.is_contiguous()
    assert torch.equal(rows, rows_reference(x))
    if dim:
        assert (rows[..., :dim].abs().amax(-1) == 127).all()
        scales = rows[..., dim:].contiguous().view(torch.float32)
        assert ((dequantized(rows, torch.float64) - x.double()).abs() <= 0.50001 * scales).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_nothing_and_of_no_numbers(isa: str, dtype: torch.dtype) -> None:
    x = torch.randn(5, 40).to(dtype)
    x[0], x[1, 3], x[2, 39], x[3, 17] = 0, NAN, torch.inf, -torch.inf
    rows = quantize_kv(x)
    assert torch.equal(rows, rows_reference(x))
    values = dequantized(rows, torch.float32)
    assert not values[0].any() and values[1:4].isnan().all() and values[4].isfinite().all()
    assert quantize_kv(x[:0]).shape == (0, 44) and quantize_kv(x[0]).shape == (44,)


def test_rows_of_any_layout(isa: str) -> None:
    x = torch.randn(2, 9, 3, 20)
    expected = rows_reference(x.transpose(1, 2).contiguous())
    for view in (x.transpose(1, 2), x.permute(3, 0, 1, 2).contiguous().permute(1, 3, 2, 0)):
        assert torch.equal(quantize_kv(view), expected)
    room = torch.full((2, 9, 3, 27), NAN)
    room[..., 3:23] = x
    assert torch.equal(quantize_kv(room[..., 3:23].transpose(1, 2)), expected)
    assert torch.equal(
        quantize_kv(x[:1, :1, :1].expand(2, 9, 3, 20)), rows_reference(x[:1, :1, :1]).expand(2, 9, 3, 24)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_masks(isa: str, dtype: torch.dtype, kind: str) -> None:
    for shape in SHAPES:
        batch, heads, _, q_len, kv_len, dim, _ = shape
        options = dict(MASKS[kind])
        mask = options.pop("mask", None)
        if mask is not None:
            mask = make_mask(mask, batch, heads, q_len, kv_len, dtype)
        if sinks := options.pop("sinks", ""):
            options["sinks"] = make_sinks(sinks, batch, heads, q_len, dtype)
        check(*states(*shape, dtype=dtype), mask, dim**-0.5, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_len", [0, 1, 7, 63, 64, 65, 129, 1000])
def test_lengths(isa: str, dtype: torch.dtype, kv_len: int) -> None:
    for q_len in (0, 1, 2, 7, 63, 129) if kv_len < 1000 else (1, 65):
        given = states(1, 2, 1, q_len, kv_len, 16, 16, dtype=dtype)
        check(*given, None, 0.2, is_causal=q_len <= kv_len)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 2, 5, 15, 16, 31, 32, 33, 64, 80, 96, 128, 130, 256])
def test_head_sizes(isa: str, dtype: torch.dtype, dim: int) -> None:
    for value_dim in {dim, 33, 129}:
        for q_len in (1, 11, 40):
            check(*states(1, 2, 1, q_len, 77, dim, value_dim, dtype=dtype), None, dim**-0.5, is_causal=True)


def test_no_channels() -> None:
    query, key, value = states(1, 2, 1, 3, 5, 0, 4, dtype=torch.float32)
    expected = dequantized(value, torch.float32).mean(2)[:, None, [0, 0]].expand(1, 3, 2, 4)
    torch.testing.assert_close(attention(query, key, value, None, 1.0), expected)
    assert attention(*states(1, 2, 1, 3, 5, 4, 0, dtype=torch.float32), None, 1.0).shape == (1, 3, 2, 0)
    assert attention(*states(0, 2, 1, 3, 5, 4, 4, dtype=torch.float32), None, 1.0).shape == (0, 3, 2, 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (6, 2), (100, 1)], ids=str)
def test_grouped_heads(isa: str, dtype: torch.dtype, heads: tuple[int, int]) -> None:
    for q_len in (1, 2, 3, 5, 17) if heads[0] < 100 else (1, 3):
        check(*states(1, *heads, q_len, 100, 16, 16, dtype=dtype), None, 0.2, is_causal=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_len", [1, 3, 40])
def test_scales_of_all_sizes_side_by_side(isa: str, dtype: torch.dtype, q_len: int) -> None:
    query, key, value = make(2, 4, 2, q_len, 300, 64, 64, dtype)
    sizes = torch.logspace(-3, 0, 300)[torch.randperm(300)][:, None]
    given = query, quantize_kv((key * sizes).to(dtype)), quantize_kv((value * sizes.flip(0)).to(dtype))
    check(*given, None, 0.125)
    check(*given, torch.rand(2, 1, q_len, 300) > 0.5, 0.125, softcap=4.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_len", [1, 4, 50])
def test_layouts(isa: str, dtype: torch.dtype, q_len: int) -> None:
    query, key, value = states(2, 8, 2, q_len, 90, 64, 64, dtype=dtype)
    expected = attention(query, key, value, None, 0.125, is_causal=True)

    def sequence_major(rows: Tensor) -> Tensor:
        return rows.transpose(1, 2).contiguous().transpose(1, 2)

    def in_a_room(rows: Tensor) -> Tensor:
        room = torch.randint(-128, 128, (2, 3, 130, 71), dtype=torch.int8)  # a scale at any address
        view = room[:, 1:, 5:95, 1:69]
        return view.copy_(rows)

    for make_view in (sequence_major, in_a_room, lambda rows: rows.mT.contiguous().mT):
        found = attention(
            sequence_major(query), make_view(key), make_view(value), None, 0.125, is_causal=True
        )
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_nobody_sees_do_not_matter(isa: str, native_only: None, dtype: torch.dtype) -> None:
    query, key, value = states(1, 2, 1, 300, 900, 64, 64, dtype=dtype)
    ages = torch.arange(300)[:, None] + 600 - torch.arange(900)
    mask = ((ages >= 0) & (ages < 70))[None, None]
    expected = attention(query, key, value, mask, 0.125)
    for rows in (key, value):
        rows[:, :, :256, -4:] = torch.tensor([NAN]).view(torch.int8)
    assert torch.equal(attention(query, key, value, mask, 0.125), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_light_keys_beside_a_heavy_one(isa: str, dtype: torch.dtype) -> None:
    """A key with nearly all of the weight, and values of 0, leaves the others as exact as alone."""
    query, key, value = make(1, 2, 1, 1, 100, 64, 64, dtype)
    value += 3
    key[:, :, 5], value[:, :, 5] = 40 * query[:, :1, 0] / query[:, :1, 0].norm(), 0
    query[:, 1] = query[:, 0]
    given = query, quantize_kv(key), quantize_kv(value)
    scaling = 10 / (40 * query[0, 0].norm().item())
    result = check(*given, None, scaling).double()
    exact = eager(query.double(), *(dequantized(rows, torch.float64) for rows in given[1:]), None, scaling)
    assert exact.abs().max() < 0.1
    assert ((result - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 1e-6).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_len", [1, 30])
def test_scales_below_zero(isa: str, dtype: torch.dtype, q_len: int) -> None:
    query, key, value = states(1, 2, 1, q_len, 70, 32, 48, dtype=dtype)
    for rows in (key, value):
        scales = rows[:, :, ::3, -4:].clone().view(torch.float32)
        rows[:, :, ::3, -4:] = scales.neg().view(torch.int8)
    check(query, key, value, None, 0.2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [128, 512, 576, 1000])
def test_the_largest_sums(isa: str, dtype: torch.dtype, dim: int) -> None:
    query, key, value = make(1, 2, 1, 2, 9, dim, 16, dtype)
    rows = quantize_kv(torch.ones_like(key) * torch.tensor([1.0, -1.0]).repeat(5)[:9, None].to(dtype))
    rows[..., 4, :-4] = -128
    query = torch.ones_like(query)
    check(query, rows, quantize_kv(value), None, 1 / dim)
    check(-query, rows, quantize_kv(value), None, 1 / dim)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [NAN, torch.inf, -torch.inf], ids=str)
def test_queries_of_no_numbers(isa: str, dtype: torch.dtype, kind: float) -> None:
    query, key, value = states(1, 4, 2, 1, 40, 40, 16, dtype=dtype)
    expected = attention(query, key, value, None, 0.2)
    query[:, 1, :, 33] = kind
    result = attention(query, key, value, None, 0.2)
    assert result[:, :, 1].isnan().all()
    assert torch.equal(result[:, :, [0, 2, 3]], expected[:, :, [0, 2, 3]])


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_every_plan(threads: int) -> None:
    torch.set_num_threads(threads)
    for dtype in DTYPES:
        for q_len, kv_len in ((1, 5000), (3, 2100), (17, 1500)):
            given = states(1, 6, 2, q_len, kv_len, 32, 32, dtype=dtype)
            check(*given, None, 0.2, is_causal=True, sinks=torch.randn(6))


def test_decode_agrees_with_prefill(isa: str) -> None:
    query, key, value = states(1, 8, 4, 200, 200, 64, 64, dtype=torch.float32)
    whole = attention(query, key, value, None, 0.125, is_causal=True)
    for end in (1, 65, 200):
        last = attention(query[:, :, end - 1 : end], key[:, :, :end], value[:, :, :end], None, 0.125)
        torch.testing.assert_close(last[:, 0], whole[:, end - 1], rtol=1e-5, atol=1e-6)


def test_reference_and_kernel_agree() -> None:
    for dtype in DTYPES:
        given = states(2, 4, 2, 7, 33, 24, 12, dtype=dtype)
        mask = make_mask("float", 2, 4, 7, 33, dtype)
        found, expected = (
            f(*given, mask, 0.2, True, 9, 3.0, torch.randn(4).mul(0)) for f in (attention, reference)
        )
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(found, expected, rtol=4 * unit, atol=4 * unit)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    query, key, value = states(2, 4, 2, 3, 9, 8, 6, dtype=dtype)
    torch.library.opcheck(torch.ops.liteboost.quantize_kv.default, (torch.randn(2, 3, 5).to(dtype),))
    options = {"is_causal": True, "sliding_window": 3, "softcap": 2.0, "sinks": torch.randn(4)}
    torch.library.opcheck(torch.ops.liteboost.int8_attention.default, (query, key, value, None, 0.3), options)


def test_it_traces_with_symbolic_lengths() -> None:
    @torch.compile(fullgraph=True, backend="eager", dynamic=True)
    def step(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, quantize_kv(key), quantize_kv(value), None, 0.2) * 1

    for kv_len in (9, 31):
        query, key, value = make(1, 4, 2, 2, kv_len, 8, 8, torch.float32)
        expected = attention(query, quantize_kv(key), quantize_kv(value), None, 0.2)
        torch.testing.assert_close(step(query, key, value), expected)


Q, K, V = (1, 4, 2, 8), (1, 2, 5, 12), (1, 2, 5, 10)
I8 = torch.int8


@pytest.mark.parametrize(
    ("query", "key", "value", "kind", "message"),
    [
        ((4, 2, 8), K, V, ValueError, "query must have shape"),
        (Q, (2, 5, 12), V, ValueError, r"key must have shape \[batch, num_kv_heads, kv_len, head_dim \+ 4\]"),
        (Q, K, (5, 10), ValueError, "value must have shape"),
        (Q, (2, 2, 5, 12), V, ValueError, "key must have the batch size of query = 1, got 2"),
        (
            Q,
            (1, 2, 5, 8),
            V,
            ValueError,
            r"key must have rows of head_dim \+ 4 with the head_dim of query = 8, got 8",
        ),
        (Q, K, (1, 2, 5, 3), ValueError, r"value must have rows of value_dim \+ 4, got 3"),
        (Q, K, (1, 2, 6, 10), ValueError, "value must have the batch, num_kv_heads and kv_len of key"),
        (
            Q,
            (1, 3, 5, 12),
            (1, 3, 5, 10),
            ValueError,
            "a number of heads that divides num_heads of query = 4",
        ),
    ],
)
@pytest.mark.parametrize("function", [attention, reference], ids=["kernel", "reference"])
def test_shapes_that_do_not_fit(
    function: object, query: tuple, key: tuple, value: tuple, kind: type, message: str
) -> None:
    given = torch.zeros(query), torch.zeros(key, dtype=I8), torch.zeros(value, dtype=I8)
    with pytest.raises(kind, match=message):
        function(*given, None, 1.0)


@pytest.mark.parametrize("function", [attention, reference], ids=["kernel", "reference"])
def test_other_arguments_that_do_not_fit(function: object) -> None:
    given = torch.zeros(Q), torch.zeros(K, dtype=I8), torch.zeros(V, dtype=I8)
    for wrong in (torch.float32, torch.uint8):
        with pytest.raises(TypeError, match=r"key must be int8.*quantize_kv"):
            function(given[0], given[1].to(wrong), given[2], None, 1.0)
    with pytest.raises(TypeError, match="query must be float32"):
        function(given[0].long(), *given[1:], None, 1.0)
    with pytest.raises(ValueError, match="mask must broadcast"):
        function(*given, torch.ones(1, 1, 2, 6, dtype=torch.bool), 1.0)
    with pytest.raises(ValueError, match="sliding_window needs is_causal"):
        function(*given, None, 1.0, False, 3)
    with pytest.raises(ValueError, match="scaling must be finite"):
        function(*given, None, NAN)
    with pytest.raises(ValueError, match="sinks must have shape"):
        function(*given, None, 1.0, sinks=torch.zeros(3))


def test_rows_that_cannot_be_made() -> None:
    for function in (quantize_kv, rows_reference):
        with pytest.raises(ValueError, match="x must have shape"):
            function(torch.tensor(1.0))
        with pytest.raises(TypeError, match="x must be float32"):
            function(torch.ones(3, dtype=torch.int32))


def test_gradients_are_refused(native_only: None) -> None:
    query, key, value = states(1, 2, 1, 2, 3, 4, 4, dtype=torch.float32)
    with torch.enable_grad():
        with pytest.raises(RuntimeError, match=r"quantize_kv.*no backward"):
            quantize_kv(torch.randn(3, 4, requires_grad=True))
        with pytest.raises(RuntimeError, match=r"int8_attention.*no backward"):
            attention(query.requires_grad_(), key, value, None, 1.0)
