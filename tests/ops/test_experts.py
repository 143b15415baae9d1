"""`liteboost::experts_linear` and `experts_combine` against float64, at every instruction set."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.compare import DTYPES, assert_refused, assert_same_on_any_threads

from liteboost_adaptor.ops.experts import experts_combine as combine_reference
from liteboost_adaptor.ops.experts import experts_linear as linear_reference

linear = torch.ops.liteboost.experts_linear
combine = torch.ops.liteboost.experts_combine

NAN = float("nan")


def rows_layout(experts: int, n: int, k: int) -> torch.Tensor:
    return torch.randn(experts, n, k)


def columns_layout(experts: int, n: int, k: int) -> torch.Tensor:
    return torch.randn(experts, k, n).mT


def neither_layout(experts: int, n: int, k: int) -> torch.Tensor:
    return torch.randn(experts, n, k, 2)[..., 0]


#: How weights lie in memory: K contiguous, N contiguous (GPT-OSS), neither.
LAYOUTS = {"rows": rows_layout, "columns": columns_layout, "neither": neither_layout}


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In another dtype with the same strides, which ``to`` would not keep for views."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
    return made.copy_(tensor)


def make(
    tokens: int, slots: int, experts: int, n: int, k: int, dtype: torch.dtype, layout: str = "rows",
    bias: bool = True, wide: bool = False,
):  # fmt: skip
    """Arguments of the op; some slots have no expert. ``wide``: x has one row a slot."""
    x = torch.randn(tokens, slots, k) if wide else torch.randn(tokens, k)
    weight = cast(LAYOUTS[layout](experts, n, k), dtype)
    index = torch.randint(0, experts + 1, (tokens, slots))
    return x.to(dtype), weight, torch.randn(experts, n).to(dtype) if bias else None, index


def double(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.double()


def check(result: torch.Tensor, x, weight, bias, index) -> None:
    """Shape, dtype, layout and each element's error: one rounding, and that of an fp32 sum of products."""
    exact = linear_reference(x.double(), weight.double(), double(bias), index)
    products = linear_reference(
        x.double().abs(), weight.double().abs(), None if bias is None else bias.double().abs(), index
    )
    assert result.shape == (*index.shape, weight.shape[1])
    assert result.dtype == x.dtype and result.is_contiguous()
    unit = torch.finfo(x.dtype).eps / 2
    error = (result.double() - exact).abs()
    assert (error <= 1.01 * unit * exact.abs() + 8 * 2.0**-24 * products + 1e-30).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_at_odd_sizes(isa: str, layout: str, dtype: torch.dtype) -> None:
    for n, k in ((1, 1), (7, 63), (65, 64), (66, 129), (300, 31), (257, 7), (5, 1000), (9, 0), (0, 9)):
        for tokens, slots, experts in ((1, 3, 5), (5, 2, 3)):
            args = make(tokens, slots, experts, n, k, dtype, layout, bias=n != 7, wide=n == 66)
            check(linear(*args), *args)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_values_at_every_number_of_tokens(isa: str, layout: str, dtype: torch.dtype) -> None:
    """Through one row, tiles, whole chunks of 32, and more than our loops take."""
    for tokens in (*range(1, 12), 31, 32, 33, 64, 65, 70):
        args = make(tokens, 1 + tokens % 8, 1 + tokens % 4, 37, 45, dtype, layout, wide=tokens % 2 == 0)
        check(linear(*args), *args)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("slots", [1, 2, 8])
def test_many_experts(isa: str, slots: int, layout: str) -> None:
    for experts in (8, 64):
        args = make(9, slots, experts, 33, 40, torch.bfloat16, layout)
        check(linear(*args), *args)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("wide", [False, True], ids=["row a token", "row a slot"])
def test_routings(isa: str, wide: bool, layout: str) -> None:
    """All tokens to one expert, one expert in all slots of a token, experts nobody uses, no expert at all."""
    x, weight, bias, _ = make(70, 3, 6, 20, 31, torch.float32, layout, wide=wide)
    for index in (
        torch.full((70, 3), 4),
        torch.randint(0, 6, (70, 1)).expand(70, 3),
        torch.full((70, 3), 6),
        torch.tensor([[0, 6, 5]]).repeat(70, 1),
    ):
        result = linear(x, weight, bias, index)
        check(result, x, weight, bias, index)
        assert (result[index == 6] == 0).all()


@pytest.mark.parametrize("sizes", [(0, 3, 4), (3, 0, 4), (0, 0, 4)])
def test_nothing_to_do(sizes: tuple[int, int, int]) -> None:
    tokens, slots, experts = sizes
    args = make(tokens, slots, experts, 5, 6, torch.float32)
    assert linear(*args).shape == (tokens, slots, 5)
    assert combine(linear(*args), torch.rand(tokens, slots)).shape == (tokens, 5)


def inside(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a view into a larger tensor of NaNs, with gaps in every dimension but the last."""
    host = torch.full([size + 2 for size in tensor.shape], NAN, dtype=tensor.dtype)
    view = host[tuple(slice(1, size + 1) for size in tensor.shape)]
    return view.copy_(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_views_read_nothing_beyond_themselves(isa: str, native_only: None, layout: str, dtype) -> None:
    for tokens in (1, 3, 40):
        x, weight, bias, index = make(tokens, 2, 3, 37, 100, dtype, layout)
        around = inside(weight.mT).mT if layout == "columns" else inside(weight)
        result = linear(inside(x), around, inside(bias), index)
        assert torch.equal(result, linear(x, weight, bias, index))


def test_layouts_of_x_and_index(isa: str, native_only: None) -> None:
    x, weight, bias, index = make(5, 4, 3, 20, 48, torch.bfloat16)
    expected = linear(x, weight, bias, index)
    assert torch.equal(linear(x.t().contiguous().t(), weight, bias, index), expected)
    assert torch.equal(linear(x, weight, bias, index.t().contiguous().t()), expected)
    assert torch.equal(linear(x, weight, torch.stack([bias, -bias], -1)[..., 0], index), expected)
    wide = x[:, None].expand(5, 4, 48)
    assert torch.equal(linear(wide, weight, bias, index), expected)
    one = weight[:1].expand(3, 20, 48)
    check(linear(x, one, bias, index), x, one, bias, index)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_that_are_not_used_are_not_read(isa: str, native_only: None, layout: str) -> None:
    x, weight, bias, _ = make(4, 2, 5, 33, 40, torch.float32, layout)
    index = torch.tensor([[0, 2], [2, 5], [0, 0], [5, 5]])
    expected = linear(x, weight, bias, index)
    for unused in (1, 3, 4):
        weight[unused], bias[unused] = NAN, NAN
    assert torch.equal(linear(x, weight, bias, index), expected)
    weight[2] = NAN
    result = linear(x, weight, bias, index)
    assert result[index == 2].isnan().all()
    assert torch.equal(result[index != 2], expected[index != 2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_that_of_linear_bit_by_bit(isa: str, native_only: None, dtype: torch.dtype) -> None:
    x, weight, bias, _ = make(1, 5, 5, 130, 515, dtype)
    result = linear(x, weight, bias, torch.arange(5)[None])
    for expert in range(5):
        alone = torch.ops.liteboost.linear(x[0], weight[expert], bias[expert])
        assert torch.equal(result[0, expert], alone)


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_number_of_threads_changes_no_bit(
    isa: str, native_only: None, dtype: torch.dtype, layout: str, tokens: int
) -> None:
    # Experts of few rows each, so that none goes to torch's product, whose order of sums is its own.
    args = make(tokens, 2, 16, 517, 301, dtype, layout)
    scores = torch.rand(tokens, 2)
    assert_same_on_any_threads(lambda: (linear(*args), combine(linear(*args), scores)))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("experts", [3, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_with_many_rows_each(
    isa: str, native_only: None, layout: str, experts: int, threads: int
) -> None:
    """Torch's product, an expert after the other or a thread each; parameters of a model, inference mode."""
    x, weight, bias, index = make(80 * experts, 1, experts, 37, 45, torch.bfloat16, layout)
    weight, bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                result = linear(x, weight, bias, index)
                assert not result.requires_grad
                check(result, x, weight, bias, index)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scores_dtype", [torch.float32, None], ids=["fp32 scores", "scores of y's dtype"])
def test_combine_values(isa: str, dtype: torch.dtype, scores_dtype: torch.dtype | None) -> None:
    for tokens, slots, n in ((1, 1, 1), (1, 8, 67), (3, 2, 64), (7, 3, 1000), (70, 8, 33), (4, 0, 9)):
        y = torch.randn(tokens, slots, n).to(dtype)
        scores = torch.randn(tokens, slots).to(scores_dtype or dtype)
        exact = combine_reference(y.double(), scores.double())
        products = combine_reference(y.double().abs(), scores.double().abs())
        for args in ((y, scores), (inside(y), inside(scores)), (y.mT.contiguous().mT, scores)):
            result = combine(*args)
            assert result.shape == (tokens, n) and result.dtype == dtype and result.is_contiguous()
            error = (result.double() - exact).abs()
            unit = torch.finfo(dtype).eps / 2
            assert (error <= 1.01 * unit * exact.abs() + 8 * 2.0**-24 * products).all()


def test_combine_rounds_once(isa: str, native_only: None) -> None:
    # 257 has no bf16: rounded to 256 before the sum, the result would be 0.
    y = torch.ones(1, 2, 1, dtype=torch.bfloat16)
    assert combine(y, torch.tensor([[257.0, -256.0]])).item() == 1.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck(dtype: torch.dtype, layout: str) -> None:
    for tokens, wide in ((0, False), (1, False), (5, True), (40, False)):
        args = make(tokens, 3, 4, 24, 40, dtype, layout, bias=tokens != 5, wide=wide)
        torch.library.opcheck(linear.default, args)
        torch.library.opcheck(combine.default, (linear(*args), torch.rand(tokens, 3)))


def test_reference() -> None:
    x, weight, bias, index = make(6, 2, 3, 5, 7, torch.float32)
    expected = torch.zeros(6, 2, 5)
    for token in range(6):
        for slot in range(2):
            expert = int(index[token, slot])
            if expert < 3:
                expected[token, slot] = F.linear(x[token], weight[expert], bias[expert])
    torch.testing.assert_close(linear_reference(x, weight, bias, index), expected)
    scores = torch.rand(6, 2)
    torch.testing.assert_close(
        combine_reference(expected, scores), torch.einsum("tsn,ts->tn", expected, scores)
    )
    assert linear_reference(x.to("meta"), weight.to("meta"), None, index.to("meta")).shape == (6, 2, 5)


def test_compiles_whole() -> None:
    def block(x, weight, bias, index, scores):
        return combine(linear(x, weight, bias, index) * 2, scores)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (3, 5):
        args = (*make(tokens, 2, 4, 24, 40, torch.float32), torch.rand(tokens, 2))
        assert torch.equal(compiled(*args), block(*args))


X, W, B = torch.zeros(2, 8), torch.zeros(3, 4, 8), torch.zeros(3, 4)
INDEX = torch.zeros(2, 2, dtype=torch.long)
BAD = {
    "weight_dim": ((X, W[0], None, INDEX), ValueError, r"weight must have shape .*got \[4, 8\]"),
    "index_dim": ((X, W, None, INDEX[0]), ValueError, r"index must have shape .*got \[2\]"),
    "x_dim": ((X[0], W, None, INDEX), ValueError, r"x must have shape .*got \[8\]"),
    "x_size": ((X[:, :7], W, None, INDEX), ValueError, r"x must have in_features = 8 .*got \[2, 7\]"),
    "x_tokens": ((X[:1], W, None, INDEX), ValueError, r"x must have tokens = 2 first.*got \[1, 8\]"),
    "x_slots": ((torch.zeros(2, 3, 8), W, None, INDEX), ValueError, r"x must have slots = 2 second.*3, 8\]"),
    "bias_shape": ((X, W, B[:2], INDEX), ValueError, r"bias must have shape .*= \[3, 4\], got \[2, 4\]"),
    "weight_dtype": ((X, W.bfloat16(), None, INDEX), TypeError, r"weight must have the dtype of x .*got"),
    "bias_dtype": ((X, W, B.half(), INDEX), TypeError, r"bias must have the dtype of x .*got"),
    "index_dtype": ((X, W, None, INDEX.int()), TypeError, r"index must be int64, got"),
    "integer": ((X.int(), W.int(), None, INDEX), TypeError, r"x must be float32, bfloat16 or float16, got"),
    "weight_device": ((X, W.to("meta"), None, INDEX), ValueError, r"weight must be on the device of .*meta"),
    "index_device": ((X, W, None, INDEX.to("meta")), ValueError, r"index must be on the device of x .*meta"),
    "negative": ((X, W, None, INDEX - 1), IndexError, r"index must be 0 .. 3 for 3 experts .*got -1"),
    "too_large": ((X, W, None, INDEX + 4), IndexError, r"index must be 0 .. 3 for 3 experts .*got 4"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_errors_name_op_and_argument(case: str) -> None:
    args, kind, text = BAD[case]
    assert_refused((linear, linear_reference), args, kind, f"liteboost::experts_linear: {text}")


Y, S = torch.zeros(2, 3, 4), torch.zeros(2, 3)
BAD_COMBINE = {
    "y_dim": ((Y[0], S), ValueError, r"y must have shape .*got \[3, 4\]"),
    "scores_shape": ((Y, S[:, :2]), ValueError, r"scores must have shape .*= \[2, 3\], got \[2, 2\]"),
    "scores_dtype": ((Y, S.half()), TypeError, r"scores must have the dtype of y .*got"),
    "scores_device": ((Y, S.to("meta")), ValueError, r"scores must be on the device of y .*meta"),
    "integer": ((Y.int(), S), TypeError, r"y must be float32, bfloat16 or float16, got"),
}


@pytest.mark.parametrize("case", BAD_COMBINE)
def test_errors_of_combine(case: str) -> None:
    args, kind, text = BAD_COMBINE[case]
    assert_refused((combine, combine_reference), args, kind, f"liteboost::experts_combine: {text}")


@pytest.mark.parametrize("position", [0, 1, 2])
def test_no_backward_is_an_error_in_grad_mode_only(position: int) -> None:
    args = make(3, 2, 4, 5, 8, torch.float32)
    args[position].requires_grad_()
    with pytest.raises(RuntimeError, match=r"liteboost::experts_linear: has no backward.* requires grad"):
        linear(*args)
    with torch.no_grad():
        assert not linear(*args).requires_grad
    y, scores = torch.rand(3, 2, 4), torch.rand(3, 2)
    (y, scores)[position % 2].requires_grad_()
    with pytest.raises(RuntimeError, match=r"liteboost::experts_combine: has no backward.* requires grad"):
        combine(y, scores)


def test_autocast_does_not_change_the_dtype(native_only: None) -> None:
    for tokens in (2, 200):
        args = make(tokens, 2, 2, 24, 40, torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            result = linear(*args)
        assert torch.equal(result, linear(*args))
