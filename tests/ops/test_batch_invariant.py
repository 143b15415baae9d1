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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_more_rows_than_the_loops_take_at_once(isa: str, dtype: torch.dtype) -> None:
    """Of products, packed and not, of experts, and of attention with all that it may have."""
    ops._set_batch_invariant_rows(2**40)
    x, weight = torch.randn(201, 130).to(dtype), torch.randn(37, 130).to(dtype)
    packed_x, tiles = torch.randn(201, 384).to(dtype), packed(w4(50, 384, *W4_FORMS[0], torch.bfloat16))
    chosen, experts, bias, index = make(201, 2, 3, 40, 130, dtype, "rows")
    products = [
        (lambda rows: ops.linear(rows, weight), x),
        (lambda rows: torch.mm(rows, weight.t()), x),
        (lambda rows: ops.linear_packed(rows, *tiles, None, 50), packed_x),
    ]
    for product, rows in products:
        assert torch.equal(product(rows), torch.cat([product(row[None]) for row in rows]))
    found = ops.experts_linear(chosen, experts, bias, index)
    each = [ops.experts_linear(chosen[i : i + 1], experts, bias, index[i : i + 1]) for i in range(201)]
    assert torch.equal(found, torch.cat(each))
    query, key = torch.randn(2, 4, 150, 40).to(dtype), torch.randn(2, 2, 900, 40).to(dtype)
    seen = torch.rand(2, 1, 150, 900) < 0.7
    sinks = torch.randn(4)
    for mask, causal, window in ((None, True, 0), (None, True, 300), (seen, False, 0), (None, False, 0)):

        def alone(i: int, mask: torch.Tensor | None, causal: bool, window: int) -> torch.Tensor:
            keys = 900 - 149 + i if causal else 900
            own = None if mask is None else mask[:, :, i : i + 1]
            given = query[:, :, i : i + 1], key[:, :, :keys], key[:, :, :keys], own
            return ops.attention(*given, 0.2, causal, window, 3.0, sinks)

        together = ops.attention(query, key, key, mask, 0.2, causal, window, 3.0, sinks)
        assert torch.equal(together, torch.cat([alone(i, mask, causal, window) for i in range(150)], 1))
    found, lse = ops.attention_part(query, key, key, None, 0.2, True)
    last = ops.attention_part(query[:, :, -1:], key, key, None, 0.2, True)
    assert torch.equal(found[:, -1:], last[0]) and torch.equal(lse[:, -1:], last[1])
    # More queries than keys: the first see none.
    few = ops.attention(query, key[:, :, :70], key[:, :, :70], None, 0.2, True)
    assert torch.equal(few[:, :80], torch.zeros(2, 80, 4, 40, dtype=dtype)) and few[:, 80:].abs().min() > 0


MASKS = ["bool", "lowest", "infinite"]


def padded_mask(
    kind: str, padding: int, tokens: int, past: int, window: int, dtype: torch.dtype
) -> torch.Tensor:
    """``[1, 1, tokens, keys]``: causal, with a window or none, behind keys of padding."""
    keys = padding + past + tokens
    distance = torch.arange(padding + past, keys)[:, None] - torch.arange(keys)
    seen = (distance >= 0) & (torch.arange(keys) >= padding)
    if window:
        seen &= distance < window
    if kind == "bool":
        return seen[None, None]
    hidden = -torch.inf if kind == "infinite" else torch.finfo(dtype).min
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, hidden)[None, None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("window", [0, 130, 600])
def test_padding(isa: str, window: int, kind: str, dtype: torch.dtype) -> None:
    """Keys of padding before those that a query sees, of rows of a batch each as many as it needs."""
    for past, tokens, paddings in (
        (0, 9, (1, 3)),
        (130, 7, (0, 5)),
        (700, 5, (515, 600)),
        (1100, 3, (1, 511)),
    ):
        check_padding(dtype, (4, 2), kind, window, past, tokens, paddings)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.sampled_from([(2, 1), (6, 3), (5, 5)]),
    st.sampled_from(MASKS),
    st.sampled_from([0, 5, 150, 700]),
    st.integers(0, 1200),
    st.integers(1, 16),
    st.tuples(st.integers(0, 1200), st.integers(0, 1200)),
)
def test_padding_of_any_lengths(dtype, heads, kind, window, past, tokens, paddings) -> None:
    check_padding(dtype, heads, kind, window, past, tokens, paddings)


def check_padding(
    dtype: torch.dtype,
    heads: tuple[int, int],
    kind: str,
    window: int,
    past: int,
    tokens: int,
    paddings: tuple[int, ...],
) -> None:
    """Each row of a batch against its own keys: in a call without a mask, or with one of floats as there."""
    ops._set_batch_invariant_rows(64, any_length=True)
    width, channels = max(paddings) + past + tokens, 40
    query = torch.randn(len(paddings), heads[0], tokens, channels).to(dtype)
    key, value = (torch.randn(len(paddings), heads[1], width, channels).to(dtype) for _ in range(2))
    masks = [padded_mask(kind, p, tokens, width - tokens - p, window, dtype) for p in paddings]
    together = ops.attention(query, key, value, torch.cat(masks), 0.2)
    for row, padding in enumerate(paddings):
        own = slice(row, row + 1)
        given = query[own], key[own, :, padding:], value[own, :, padding:]
        if kind == "bool":
            alone = ops.attention(*given, None, 0.2, True, window)
        else:
            alone = ops.attention(*given, masks[row][..., padding:], 0.2)
        assert torch.equal(together[own], alone), f"row {row} of {padding} keys of padding"


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_delta_rule(isa: str, dtype: torch.dtype, normalize: bool) -> None:
    """Prompts, chunks of them and single tokens."""
    ops._set_batch_invariant_rows(64, any_length=True)
    query, key = (torch.randn(2, 23, 2, 24).to(dtype) for _ in range(2))
    value = torch.randn(2, 23, 4, 40).to(dtype)
    g, beta = -torch.rand(2, 23, 4), torch.rand(2, 23, 4).to(dtype)

    def run(sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        state, found, begin = None, [], 0
        for size in sizes:
            given = [x[:, begin : begin + size] for x in (query, key, value, g, beta)]
            out, state = ops.chunk_gated_delta_rule(*given, state, scaling=0.2, normalize=normalize)
            found.append(out)
            begin += size
        assert state is not None
        return torch.cat(found, 1), state

    alone = run([1] * 23)
    for sizes in ([23], [7, 7, 7, 2], [1, 16, 6]):
        assert all(map(torch.equal, run(sizes), alone)), sizes
    state = torch.zeros(2, 4, 24, 40)
    out = ops.recurrent_gated_delta_rule(
        *(query, key, value, g, beta, state), scaling=0.2, normalize=normalize
    )
    assert torch.equal(out, alone[0]) and torch.equal(state, alone[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", [3, 14, 16, 30, 47, 100])
def test_hidden_keys_behind_those_that_are_seen(isa: str, keys: int, dtype: torch.dtype) -> None:
    """Of so many rows that sums in another order show: a vector of keys more, and all of them hidden."""
    query = torch.randn(64, 16, 1, 32).to(dtype)
    key, value = (torch.randn(64, 16, keys + 40, 32).to(dtype) for _ in range(2))
    alone = ops.attention(query, key[:, :, :keys], value[:, :, :keys], None, 1.0)
    for hidden in (1, 5, 16, 40):
        every = key[:, :, : keys + hidden], value[:, :, : keys + hidden]
        mask = torch.arange(keys + hidden)[None, None, None] < keys
        assert torch.equal(ops.attention(query, *every, mask, 1.0), alone), f"{hidden} hidden keys"


def test_speculation_leaves_what_it_is_compared_with_alone() -> None:
    """Of one row behind padding, and of a prompt's state: bits that they have where nothing is asked for."""
    query, key = torch.randn(1, 4, 1, 40), torch.randn(1, 2, 400, 40)
    mask = torch.arange(400)[None, None, None] >= 30
    inputs = [torch.randn(1, 12, 2, 24) for _ in range(3)], [-torch.rand(1, 12, 2), torch.rand(1, 12, 2)]

    def found() -> tuple[torch.Tensor, ...]:
        state = ops.chunk_gated_delta_rule(*inputs[0], *inputs[1], None, scaling=0.2)
        return ops.attention(query, key, key, mask, 0.2), *state, torch.softmax(query, -1)

    ops._set_batch_invariant_rows(1)
    plain = found()
    ops._set_batch_invariant_rows(16)
    assert all(map(torch.equal, found(), plain))


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_products_of_torch_have_the_bits_of_torch(dtype: torch.dtype) -> None:
    """Each row those that it has, in a tensor of its own, where nothing is asked for: a speculated text's."""
    weight, bias = torch.randn(40, 130).to(dtype), torch.randn(40).to(dtype)
    x = torch.randn(16, 130).to(dtype)
    products: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: torch.mm(x, weight.t()),
        lambda x: torch.addmm(bias, x, weight.t()),
        lambda x: torch.nn.functional.linear(x, weight, bias),
    ]
    ops._set_batch_invariant_rows(1)
    alone = [torch.cat([product(row[None].clone()) for row in x]) for product in products]
    ops._set_batch_invariant_rows(64)
    assert all(torch.equal(product(x), rows) for product, rows in zip(products, alone, strict=True))


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
