"""Products, softmax and functions of elements as `LITEBOOST_BATCH_INVARIANT` has them, also torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import DTYPES
from torch.nn import functional as F

ops = torch.ops.liteboost
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softplus": F.softplus,
    "mish": F.mish,
    "elu": F.elu,
    "exp2": torch.exp2,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.1),
}
#: Of one rounding to the dtype, and of fp32 arithmetic before it.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.fixture(autouse=True)
def any_length() -> Iterator[None]:
    before = ops._batch_invariant_rows()
    ops._set_batch_invariant_rows(2**40, any_length=True)
    yield
    ops._set_batch_invariant_rows(before)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 4),
    st.integers(1, 64),
    st.integers(1, 700),
    st.integers(1, 150),
    st.booleans(),
    st.booleans(),
)
def test_products_against_float64(dtype, batch, rows, k, columns, x_lies, y_lies) -> None:
    """Of transposed and of plain operands, which lie at an offset in a larger tensor."""
    x = lying(batch, rows, k, x_lies).to(dtype)
    y = lying(batch, k, columns, y_lies).to(dtype)
    add = torch.randn(batch, 1, columns).to(dtype)
    exact = x.double() @ y.double()
    bound = 1.01 * torch.finfo(dtype).eps / 2
    least = 2.0**-25 if dtype == torch.float16 else 1e-38  # of numbers below the normal ones
    assert ((torch.bmm(x, y).double() - exact).abs() <= bound * exact.abs() + least).all()
    sums = 0.5 * add.double() - 2 * exact
    found = torch.baddbmm(add, x, y, beta=0.5, alpha=-2)
    assert ((found.double() - sums).abs() <= bound * sums.abs() + least).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [256, 512, 514, 1024, 1090, 1531, 3000])
def test_products_of_many_rows(isa: str, dtype: torch.dtype, k: int) -> None:
    """Packed chain by chain: of whole turns of all sums, of steps behind them and of a part of one."""
    check_many_rows(dtype, 200, 120, k, 1)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 420),
    st.integers(1, 330) | st.sampled_from([64, 128, 192]),
    st.integers(1, 2500),
    st.integers(1, 3),
)
def test_products_of_any_shape(dtype, rows, n, k, threads) -> None:
    torch.set_num_threads(threads)
    check_many_rows(dtype, rows, n, k, threads)


@pytest.mark.parametrize("k", [512, 544, 1040, 1043, 1056])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_signs_of_zero(isa: str, dtype: torch.dtype, k: int) -> None:
    """Of sums whose products are below all numbers: zeros that fill a chain change no sign."""
    x, weight = torch.full((32, k), 1e-30).to(dtype), torch.full((64, k), -1e-30).to(dtype)
    alone = ops.linear(x[:1], weight)
    assert torch.equal(ops.linear(x, weight)[:1].signbit(), alone.signbit())


def check_many_rows(dtype: torch.dtype, rows: int, n: int, k: int, offset: int) -> None:
    """Of weights whose rows lie apart, and an x that is not contiguous, against products of one row."""
    weight, bias = torch.randn(n, k + offset)[:, offset:].to(dtype), torch.randn(n).to(dtype)
    weight = torch.nn.functional.pad(weight, (0, 3))[:, :k]
    x = torch.randn(rows, 2, k).to(dtype)[:, 1]
    alone = torch.cat([ops.linear(row, weight, bias) for row in x.split(1)])
    assert torch.equal(ops.linear(x, weight, bias), alone)
    both = ops._linears(x, [weight, weight.flip(0)], [bias, None])
    assert torch.equal(both[0], alone)
    assert torch.equal(both[1], torch.cat([ops.linear(row, weight.flip(0)) for row in x.split(1)]))
    if n % 4 == 0:
        assert torch.equal(ops.linear(x.unflatten(0, (-1, 1)), weight, bias).flatten(0, 1), alone)


def lying(batch: int, rows: int, columns: int, is_transposed: bool) -> torch.Tensor:
    if is_transposed:
        return torch.randn(batch, columns + 1, rows + 2)[:, 1:, 2:].mT
    return torch.randn(batch, rows + 1, columns + 2)[:, 1:, 2:]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_of_products(isa: str, dtype: torch.dtype) -> None:
    """As Bloom writes it: no bit depends on queries beside one, nor on hidden keys around those it sees."""
    query, key, value = (torch.randn(3, 2, 600, 40).to(dtype) for _ in range(3))

    def attended(first: int, last: int, padding: int, hidden: int, least: float) -> torch.Tensor:
        k, v = (
            torch.cat([torch.randn(3, 2, padding, 40).to(dtype), x[:, :, :last]], 2) for x in (key, value)
        )
        k, v = (torch.cat([x, torch.randn(3, 2, hidden, 40).to(dtype)], 2) for x in (k, v))
        distance = torch.arange(first, last)[:, None] - torch.arange(-padding, last + hidden)
        mask = (distance < 0) | (torch.arange(-padding, last + hidden) < 0)
        logits = torch.matmul(query[:, :, first:last], k.mT) / 40**0.5
        shares = torch.softmax(logits.float().masked_fill(mask, least), -1).to(dtype)
        return torch.matmul(shares, v)

    lowest = torch.finfo(torch.float32).min
    alone = torch.cat([attended(i, i + 1, 0, 0, lowest) for i in range(540, 600)], 2)
    assert torch.equal(attended(540, 600, 0, 0, lowest), alone)
    assert torch.equal(attended(540, 600, 0, 0, -torch.inf), alone)
    for padding, hidden in ((1, 0), (37, 5), (300, 1)):
        assert torch.equal(attended(540, 600, padding, hidden, lowest), alone)
        assert torch.equal(attended(597, 600, padding, hidden, -torch.inf), alone[:, :, -3:])
    q, k, v = (x.double() for x in (query[:, :, -1:], key, value))
    exact = torch.softmax(q @ k.mT / 40**0.5, -1) @ v
    torch.testing.assert_close(alone[:, :, -1:].double(), exact, rtol=0, atol=6 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 3, 15, 16, 17, 64, 1000, 4097])
def test_softmax_against_float64(isa: str, columns: int, dtype: torch.dtype) -> None:
    x = (8 * torch.randn(2, 5, columns)).to(dtype)
    exact = torch.softmax(x.double(), -1)
    found = torch.softmax(x, -1)
    assert found.dtype == dtype and found.shape == x.shape
    assert ((found.double() - exact).abs() <= 4 * TOLERANCE[dtype] * exact + 1e-7).all()
    assert torch.equal(torch.softmax(x.mT.contiguous().mT, -1), found)
    assert torch.equal(torch.softmax(x.mT, 1), torch.softmax(x.mT, -2))


def test_softmax_of_more_than_can_be_summed_as_integers() -> None:
    for columns in (2**22, 2**22 + 1, 2**23):
        sums = torch.softmax(torch.zeros(2, columns), -1).double().sum(-1)
        torch.testing.assert_close(sums, torch.ones(2, dtype=torch.float64))


def test_softmax_of_what_is_not_finite() -> None:
    inf, nan = torch.inf, torch.nan
    rows = [
        [1.0, nan, 2.0],
        [inf, 1.0, 2.0],
        [inf, inf, 0.0],
        [-inf] * 3,
        [-inf, 0.0, -inf],
        [nan, -inf, inf],
    ]
    for columns in (3, 40):
        x = torch.tensor(rows).repeat_interleave(columns // 3, 1)
        found = torch.softmax(x, -1)
        ops._set_batch_invariant_rows(1)
        theirs = torch.softmax(x, -1)
        ops._set_batch_invariant_rows(2**40, any_length=True)
        torch.testing.assert_close(found, theirs, equal_nan=True, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_elements(name: str, dtype: torch.dtype) -> None:
    """Of every shape, in rows that are no multiple of a vector, and so many that threads share them."""
    function = FUNCTIONS[name]
    for shape in ((7, 4), (3, 5, 48), (2, 33, 5, 1), (9, 1030), (70, 1003)):
        x = (3 * torch.randn(shape)).to(dtype)
        found = function(x)
        assert torch.equal(torch.cat([function(row[None]) for row in x]), found)
        columns = x.transpose(0, -1)
        assert torch.equal(function(columns), found.transpose(0, -1))
        assert function(columns).stride() == columns.stride()
        ops._set_batch_invariant_rows(1)
        torch.testing.assert_close(function(x), found, rtol=4 * TOLERANCE[dtype], atol=2e-6)
        ops._set_batch_invariant_rows(2**40, any_length=True)
    for shape in ((), (0, 4), (7,)):
        assert function(torch.zeros(shape, dtype=dtype)).shape == shape


@pytest.mark.parametrize("name", [*FUNCTIONS, "softmax", "bmm", "baddbmm"])
def test_gradients(name: str) -> None:
    others = {
        "softmax": lambda x: torch.softmax(x, -1),
        "bmm": lambda x: torch.bmm(x, x.mT),
        "baddbmm": lambda x: torch.baddbmm(x, x, x.mT @ x),
    }
    function = {**FUNCTIONS, **others}[name]
    x = torch.randn(3, 5, 6, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    (function(x) ** 2).sum().backward()
    (function(exact) ** 2).sum().backward()
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-4, atol=1e-4)


def test_what_torch_refuses_is_refused() -> None:
    x = torch.randn(2, 3, 4)
    for call in (
        lambda: torch.bmm(x, x),
        lambda: torch.bmm(x, x.mT.bfloat16()),
        lambda: torch.baddbmm(torch.zeros(7), x, x.mT),
        lambda: torch.softmax(x, 3),
    ):
        with pytest.raises((RuntimeError, IndexError)):
            call()
    # Zero times NaN: torch reads nothing of what is added then.
    spoiled = torch.full((2, 3, 3), torch.nan)
    assert torch.baddbmm(spoiled, x, x.mT, beta=0).isfinite().all()
    assert torch.equal(torch.bmm(x[:, :, :0], x.mT[:, :0]), torch.zeros(2, 3, 3))


def test_torch_has_its_own_again() -> None:
    x = torch.randn(4, 9, 33)
    ours = torch.softmax(x, -1), torch.bmm(x, x.mT), F.gelu(x)
    ops._set_batch_invariant_rows(64)
    rows_only = torch.softmax(x, -1), torch.bmm(x, x.mT), F.gelu(x)
    ops._set_batch_invariant_rows(1)
    theirs = torch.softmax(x, -1), torch.bmm(x, x.mT), F.gelu(x)
    assert all(map(torch.equal, rows_only, theirs))
    assert not all(map(torch.equal, ours, theirs))
