"""Each of up to as many rows as are asked for has the bits that it has alone, at every instruction set."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.test_experts import LAYOUTS, make
from ops.test_int8_linear import layer as w8a8
from ops.test_quantized_experts import FORMS, Layer
from ops.test_quantized_linear import W4_FORMS, packed, w4, w8
from support.compare import DTYPES
from torch.nn import functional as F

ops = torch.ops.liteboost
ACTIVATIONS = [torch.sigmoid, F.silu, F.softplus]
ROWS = [2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 31, 33, 64]


@pytest.fixture(autouse=True)
def rows_asked() -> Iterator[None]:
    before = ops._batch_invariant_rows()
    ops._set_batch_invariant_rows(64)
    yield
    ops._set_batch_invariant_rows(before)


def check_rows(product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """``product`` of some rows of ``x`` is made of its products of one."""
    alone = torch.cat([product(x[i : i + 1]) for i in range(len(x))])
    for rows in ROWS:
        made = product(x[:rows])
        differing = (made != alone[:rows]).flatten(1).any(1).nonzero().flatten().tolist()
        assert torch.equal(made, alone[:rows]), f"{rows} rows: rows {differing} have other bits"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(37, 41), (130, 256), (70, 1100), (5, 4100), (1, 1), (64, 33)])
def test_linear(isa: str, n: int, k: int, dtype: torch.dtype) -> None:
    weight, bias = torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
    check_rows(lambda x: ops.linear(x, weight, bias), torch.randn(64, k).to(dtype))
    both = [weight, weight.flip(0)], [bias, None]
    check_rows(lambda x: torch.cat(ops._linears(x, *both), -1), torch.randn(64, k).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_linear(isa: str, dtype: torch.dtype) -> None:
    gate, up = torch.randn(90, 70).to(dtype), torch.randn(90, 70).to(dtype)
    check_rows(lambda x: ops.gated_linear(x, gate, None, up, None, "silu"), torch.randn(64, 70).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["w8", *W4_FORMS], ids=str)
def test_linear_packed(isa: str, form: object, dtype: torch.dtype) -> None:
    layer = w8(50, 384) if form == "w8" else w4(50, 384, *form, torch.bfloat16)
    tiles, x = packed(layer), torch.randn(64, 384).to(dtype)
    check_rows(lambda x: ops.linear_packed(x, *tiles, None, 50), x)

    def together(x: torch.Tensor) -> torch.Tensor:
        given = [[each, each] for each in (*tiles, None)]
        return torch.cat(ops._linears_packed(x, *given, [50, 50]), -1)

    check_rows(together, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounded_activations(isa: str, dtype: torch.dtype) -> None:
    x = torch.randn(64, 256).to(dtype)
    weight, scales = w8a8(40, 256)
    check_rows(lambda x: ops.linear_w8a8(x, weight, scales), x)
    both = [weight, weight.flip(0)], [scales, scales], [None, None]
    check_rows(lambda x: torch.cat(ops._linears_w8a8(x, *both), -1), x)
    tiles = packed(w4(40, 256, 32, True))
    check_rows(lambda x: ops.linear_w4a8(x, *tiles, None, 40), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_linear(isa: str, layout: str, dtype: torch.dtype) -> None:
    x, weight, bias, index = make(64, 2, 3, 40, 130, dtype, layout)
    index[::2] = 1  # more rows of one expert than tokens are asked for
    both = torch.arange(64)

    def product(rows: torch.Tensor) -> torch.Tensor:
        chosen = both[rows]
        return ops.experts_linear(x[chosen], weight, bias, index[chosen])

    check_rows(product, both)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_experts_packed(isa: str, form: str, dtype: torch.dtype) -> None:
    layer, x = Layer(form, 3, 144, 192), torch.randn(64, 192).to(dtype)
    index, both = torch.randint(0, 4, (64, 2)), torch.arange(64)
    index[8:] = 1  # more rows of one expert than tokens are asked for
    check_rows(
        lambda rows: ops.experts_packed(*layer.arguments(x[both[rows]], None, index[both[rows]])), both
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lies", ["inputs", "outputs"])
def test_head_linear(isa: str, lies: str, dtype: torch.dtype) -> None:
    weight = torch.randn(3, 40, 70) if lies == "inputs" else torch.randn(3, 70, 40).mT
    weight = weight.to(dtype) if lies == "inputs" else weight.mT.to(dtype).mT
    check_rows(lambda x: ops.head_linear(x, weight), torch.randn(64, 3, 1, 70).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (16, 1), (40, 1)], ids=str)
@pytest.mark.parametrize("window", [0, 70, 600])
def test_attention(isa: str, window: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    """New tokens of a step, causal, against a call for each of them with the keys that it sees."""
    for past, tokens, channels in ((3, 5, 64), (126, 4, 40), (509, 7, 64), (700, 16, 33)):
        check_attention(dtype, heads, window, past, tokens, channels)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([(2, 1), (6, 3), (5, 5)]),
    st.integers(0, 1200),
    st.integers(0, 1300),
    st.integers(2, 16),
    st.integers(1, 72),
)
def test_attention_of_any_lengths(dtype, heads, window, past, tokens, channels) -> None:
    check_attention(dtype, heads, window, past, tokens, channels)


def check_attention(
    dtype: torch.dtype, heads: tuple[int, int], window: int, past: int, tokens: int, channels: int
) -> None:
    query = torch.randn(1, heads[0], tokens, channels).to(dtype)
    key, value = (torch.randn(1, heads[1], past + tokens, channels).to(dtype) for _ in range(2))

    def attended(first: int, last: int, keys: int) -> torch.Tensor:
        given = query[:, :, first:last].contiguous(), key[:, :, :keys], value[:, :, :keys]
        return ops.attention(*given, None, 0.2, True, window)

    alone = torch.cat([attended(i, i + 1, past + i + 1) for i in range(tokens)], 1)
    assert torch.equal(attended(0, tokens, past + tokens), alone)
    first = tokens // 3
    parts = attended(0, first, past + first), attended(first, tokens, past + tokens)
    assert torch.equal(torch.cat(parts, 1), alone)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_no_bit(threads: int) -> None:
    before = torch.get_num_threads()
    x, weight = torch.randn(6, 300).bfloat16(), torch.randn(500, 300).bfloat16()
    query = torch.randn(1, 4, 6, 64)
    key = torch.randn(1, 2, 2000, 64)
    one = ops.linear(x, weight), ops.attention(query, key, key, None, 0.1, True)
    try:
        torch.set_num_threads(threads)
        many = ops.linear(x, weight), ops.attention(query, key, key, None, 0.1, True)
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, one, many))


def test_fewer_rows_than_one_are_refused() -> None:
    with pytest.raises(ValueError, match="rows must be 1 or more, got 0"):
        ops._set_batch_invariant_rows(0)
    assert ops._batch_invariant_rows() == 64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_torch_itself(isa: str, dtype: torch.dtype) -> None:
    """As `F.linear` of a router asks for them, and Conv1D of GPT-2, whose outputs lie side by side."""
    weight, bias = torch.randn(40, 130).to(dtype), torch.randn(40).to(dtype)
    columns, x = torch.randn(130, 40).to(dtype), torch.randn(64, 130).to(dtype)
    check_rows(lambda x: torch.mm(x, weight.t()), x)
    check_rows(lambda x: torch.nn.functional.linear(x, weight, bias), x)
    check_rows(lambda x: torch.nn.functional.linear(x[None], weight)[0], x)
    check_rows(lambda x: torch.addmm(bias, x, columns), x)
    exact = torch.addmm(bias.double(), x.double(), columns.double())
    torch.testing.assert_close(torch.addmm(bias, x, columns).double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 4, 31, 33, 64, 1030])
@pytest.mark.parametrize("function", ACTIVATIONS, ids=lambda function: function.__name__)
def test_activations_of_torch_itself(
    function: Callable[[torch.Tensor], torch.Tensor], width: int, dtype: torch.dtype
) -> None:
    """torch has one exp for vectors, and another for what is left behind the last: each row is as alone."""
    x = (4 * torch.randn(64, width)).to(dtype)
    check_rows(function, x)
    check_rows(lambda x: function(x[None])[0], x)
    ours = function(x)
    ops._set_batch_invariant_rows(1)
    assert torch.equal(torch.cat([function(row[None]) for row in x]), ours), "the bits of one row are torch's"
    columns = x.t()
    expected = function(columns)
    ops._set_batch_invariant_rows(64)
    assert torch.equal(function(columns), expected) and function(columns).stride() == expected.stride()
    for shape in ((), (0, 4), (7,), (65, 4)):
        assert function(torch.zeros(shape, dtype=dtype)).shape == shape


@pytest.mark.parametrize("function", ACTIVATIONS, ids=lambda function: function.__name__)
def test_activations_of_torch_itself_have_gradients(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(5, 6, dtype=torch.float32, requires_grad=True)
    function(x).sum().backward()
    exact = x.detach().double().requires_grad_()
    function(exact).sum().backward()
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)


def test_torch_keeps_its_products_where_one_row_is_asked_for(recwarn: pytest.WarningsRecorder) -> None:
    x, weight = torch.randn(7, 300), torch.randn(300, 50)
    ours = torch.mm(x, weight.t().contiguous().t())
    ops._set_batch_invariant_rows(1)
    theirs = torch.mm(x, weight)
    ops._set_batch_invariant_rows(64)
    assert torch.equal(torch.mm(x, weight.t().contiguous().t()), ours)
    # Torch's sums of 300 products are off by up to 4e-5 (OpenBLAS), ours by less.
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-4)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        torch.mm(x, weight.t())
    x.requires_grad_()
    torch.mm(x, weight).sum().backward()
    assert x.grad is not None and not recwarn.list
