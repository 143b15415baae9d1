"""`liteboost::linear` against float64, at every instruction set, layout and number of rows and threads."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support import processes
from support.compare import DTYPES, FLOOR, SIZES, assert_refused, assert_same_on_any_threads

from liteboost_adaptor.ops.linear import linear as reference

linear = torch.ops.liteboost.linear


def linears(*given: list) -> list[torch.Tensor]:
    """What programs run for several layers with one input."""
    return torch.ops.liteboost._linears(*given)


NAN = float("nan")


def make(rows: int, n: int, k: int, dtype: torch.dtype, bias: bool = True):
    x = torch.randn(rows, k, dtype=torch.float32).to(dtype)
    weight = torch.randn(n, k, dtype=torch.float32).to(dtype)
    return x, weight, torch.randn(n, dtype=torch.float32).to(dtype) if bias else None


def double(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.double()


def check(result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Shape, dtype, layout, each element's error, and the whole's against the original's."""
    exact = F.linear(x.double(), weight.double(), double(bias))
    assert result.shape == exact.shape and result.dtype == x.dtype and result.is_contiguous()
    if result.numel() == 0:
        return
    error = (result.double() - exact).abs()
    # One rounding of the result, and the rounding of an fp32 sum of products of this size.
    products = F.linear(
        x.double().abs(), weight.double().abs(), None if bias is None else bias.double().abs()
    )
    unit = torch.finfo(x.dtype).eps / 2
    assert (error <= 1.01 * unit * exact.abs() + 8 * 2.0**-24 * products + 1e-30).all()
    if result.numel() < 60:
        return  # So few may all be lucky in the original.
    # Of copies: with AMX, torch's own product of 17 rows in bf16 takes what lies beside a view into its sums.
    copies = [
        None if each is None else each.clone(memory_format=torch.contiguous_format)
        for each in (x, weight, bias)
    ]
    original = F.linear(*copies).double() - exact
    assert error.norm() <= 1.5 * original.norm() + FLOOR[x.dtype] * exact.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", SIZES)
def test_values_at_every_length(isa: str, dtype: torch.dtype, k: int) -> None:
    for n in (1, 7, 65):
        for rows in (1, 3, 6):
            args = make(rows, n, k, dtype, bias=n != 7)
            check(linear(*args), *args)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_values_at_every_number_of_rows(isa: str, dtype: torch.dtype, bias: bool) -> None:
    for rows in range(21):
        args = make(rows, 70, 97, dtype, bias)
        check(linear(*args), *args)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [(97, 64, 256), (193, 65, 258), (130, 63, 131), (400, 200, 34), (1030, 300, 70), (2100, 66, 37)],
)
def test_values_of_prompts(isa: str, dtype: torch.dtype, bias: bool, rows: int, n: int, k: int) -> None:
    """Many rows: panels of 64 columns, chunks of 192 rows, blocks of 128 or 256 of K, 2,048 rows widened."""
    x, weight, shift = make(rows, n + 2, k + 5, dtype, bias)
    # Rows of weight that lie apart and begin anywhere, and x that has to be made contiguous.
    weight, shift = weight[2:, 3 : k + 3], None if shift is None else shift[2:]
    check(linear(x[:, :k], weight, shift), x[:, :k], weight, shift)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_prompts_do_not_depend_on_the_threads(isa: str, dtype: torch.dtype) -> None:
    """Of few panels the rows are shared out, too."""
    args = make(700, 70, 90, dtype)
    assert_same_on_any_threads(lambda: linear(*args))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [32, 33, 64, 65, 100, 256, 257])
def test_values_around_the_limits_of_chunks_and_of_what_is_served(
    isa: str, dtype: torch.dtype, rows: int
) -> None:
    args = make(rows, 37, 70, dtype)
    check(linear(*args), *args)


@pytest.mark.parametrize("rows", [8, 9, 15, 16, 17, 31, 32, 33])
def test_values_of_a_weight_beyond_a_cores_cache(isa: str, rows: int) -> None:
    """More of its rows are served in fp32 than of a small one, which torch multiplies faster."""
    args = make(rows, 530, 515, torch.float32)
    assert args[1].nbytes > 1 << 20
    check(linear(*args), *args)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_values_at_every_number_of_outputs(isa: str, dtype: torch.dtype, n: int) -> None:
    for rows in (1, 5):
        args = make(rows, n, 33, dtype)
        check(linear(*args), *args)


@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 3, 64), (2, 0, 64), (3, 1, 4, 64), (5, 7, 64)])
def test_leading_dimensions(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    _, weight, bias = make(1, 10, 64, torch.float32)
    check(linear(x, weight, bias), x, weight, bias)


def inside(tensor: torch.Tensor, before: int = 3, after: int = 5) -> torch.Tensor:
    """The same values as a view into a larger tensor of NaNs, at an odd offset, with gaps between rows."""
    rows, cols = tensor.shape
    host = torch.full((rows + 2, cols + before + after), NAN, dtype=tensor.dtype)
    view = host[1 : rows + 1, before : before + cols]
    view.copy_(tensor)
    return view


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 17])
def test_views_read_nothing_beyond_themselves(
    isa: str, native_only: None, dtype: torch.dtype, rows: int
) -> None:
    for k in (1, 15, 31, 64, 100):
        x, weight, bias = make(rows, 37, k, dtype)
        host = torch.full((41,), NAN, dtype=dtype)
        host[3:40] = bias
        args = inside(x), inside(weight), host[3:40]
        assert torch.equal(linear(*args), linear(x, weight, bias))
        check(linear(*args), *args)


@pytest.mark.parametrize("rows", [1, 4, 9, 18])
def test_layouts(isa: str, native_only: None, rows: int) -> None:
    x, weight, bias = make(rows, 40, 48, torch.bfloat16)
    expected = linear(x, weight, bias)
    # Transposed x, x with a step, bias with a step: copied, so the very same result.
    assert torch.equal(linear(x.t().contiguous().t(), weight, bias), expected)
    assert torch.equal(linear(torch.stack([x, -x], -1)[..., 0], weight, bias), expected)
    assert torch.equal(linear(x, weight, torch.stack([bias, -bias], -1)[:, 0]), expected)
    # A weight with gaps between its rows, or one row for all.
    assert torch.equal(linear(x, torch.cat([weight, -weight], 1)[:, :48], bias), expected)
    one = weight[:1].expand(40, 48)
    check(linear(x, one, bias), x, one, bias)
    # A transposed weight, as Conv1D keeps it, goes another way: within rounding.
    transposed = weight.t().contiguous().t()
    check(linear(x, transposed, bias), x, transposed, bias)
    expanded = x[:1].expand(rows, 48)
    assert torch.equal(linear(expanded, weight, bias), linear(expanded.contiguous(), weight, bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 6])
def test_nan_and_infinity_stay_in_their_row_and_column(
    isa: str, native_only: None, dtype: torch.dtype, rows: int
) -> None:
    x, weight, bias = make(rows, 21, 45, dtype)
    clean = linear(x, weight, bias)
    weight[4, 44] = float("inf")
    weight[9, 0] = NAN
    result = linear(x, weight, bias)
    assert result[:, 4].isinf().all() and result[:, 9].isnan().all()
    others = [n for n in range(21) if n not in (4, 9)]
    assert torch.equal(result[:, others], clean[:, others])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 65, 200])
def test_a_bias_whose_elements_are_not_adjacent(isa: str, dtype: torch.dtype, rows: int) -> None:
    x, weight, bias = make(rows, 33, 64, dtype)
    assert bias is not None
    spread = torch.stack([bias, torch.full_like(bias, NAN)], -1)[..., 0]
    assert torch.equal(linear(x, weight, spread), linear(x, weight, bias))
    one = bias[:1].expand(33)
    assert torch.equal(linear(x, weight, one), linear(x, weight, one.contiguous()))


# 256 + 1 has no bf16 between 256 and 258, nor 2048 + 1 an fp16; rounded first, the sums below would be 1.
@pytest.mark.parametrize(("dtype", "large"), [(torch.bfloat16, 256.0), (torch.float16, 2048.0)], ids=str)
@pytest.mark.parametrize("rows", [1, 6, 200])
@pytest.mark.parametrize("weight", ["as stored", "transposed"])
@pytest.mark.parametrize("x", ["one row after the other", "columns first", "batch second", "vector"])
def test_the_bias_is_added_before_the_rounding(
    isa: str, x: str, weight: str, rows: int, dtype: torch.dtype, large: float
) -> None:
    k, n = 64, 40
    values = torch.zeros(rows, k, dtype=dtype)
    values[:, 0], values[:, 1] = large, 1.0
    matrix = torch.ones(n, k, dtype=dtype)
    if weight == "transposed":
        matrix = matrix.t().contiguous().t()
    if x == "columns first":
        values = values.t().contiguous().t()
    elif x == "batch second":
        values = torch.stack([values, values]).transpose(0, 1)
    elif x == "vector":
        values = values[0]
    bias = torch.full((n,), 1.0 - large, dtype=dtype)
    for run in (linear, reference):
        result = run(values, matrix, bias)
        assert result.shape == (*values.shape[:-1], n)
        assert (result == 2.0).all()


PRODUCTS_OF_ALL_SIZES = """
import sys
import torch
from liteboost_adaptor import native

native.load()
dtype = getattr(torch, sys.argv[1])
x, weight, bias = (torch.randn(*sizes).to(dtype) for sizes in ((700, 48), (32, 48), (32,)))
exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
unit = torch.finfo(dtype).eps
for rows in range(1, 701):
    result = torch.ops.liteboost.linear(x[:rows], weight, bias)
    assert result.shape == (rows, 32) and result.is_contiguous()
    torch.testing.assert_close(result.double(), exact[:rows], rtol=unit, atol=3e-5)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_makes_code_for_few_numbers_of_rows(native_only: None, dtype: str) -> None:
    # As a server asks for them whose prompts have all lengths. oneDNN says for what it makes code.
    done = processes.python(PRODUCTS_OF_ALL_SIZES, dtype, ONEDNN_VERBOSE="profile_create")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("create:cache_miss,cpu") <= 128 + 8 * 5


@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_number_of_threads_changes_no_bit(
    isa: str, native_only: None, dtype: torch.dtype, rows: int
) -> None:
    args = make(rows, 1037, 515, dtype)
    assert_same_on_any_threads(lambda: linear(*args))


def threads_of(run: Callable[[], object], times: int = 8) -> int:
    """How many threads of this process take part in `run`: those that the system schedules each time.

    However busy the machine is: who takes part is woken, and who does not stays asleep.
    """
    own = str(threading.get_native_id())

    def others() -> list[Path]:
        return [task for task in Path("/proc/self/task").iterdir() if task.name != own]

    def is_asleep(task: Path) -> bool:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "S"

    def scheduled() -> dict[str, int]:
        return {task.name: int((task / "schedstat").read_text().split()[2]) for task in others()}

    run()
    woken: Counter[str] = Counter()
    for _ in range(times):
        while not all(map(is_asleep, others())):  # threads of a parallel region wait actively for a while
            time.sleep(0.005)
        before = scheduled()
        run()
        woken.update(name for name, count in scheduled().items() if count > before.get(name, 0))
    # One that somebody else wakes now and then, to read from a pipe, is not of it.
    return 1 + sum(count > times // 2 for count in woken.values())


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs /proc to see who is scheduled")
def test_the_number_of_threads_is_honoured(native_only: None) -> None:
    large, small = make(1, 2048, 2048, torch.float32), make(1, 64, 64, torch.float32)
    cached, more_rows = make(4, 512, 256, torch.float32), make(8, 512, 256, torch.float32)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert threads_of(lambda: linear(*large)) == 2
        # Not worth waking a second one, for few rows.
        assert threads_of(lambda: linear(*small)) == 1
        assert threads_of(lambda: linear(*cached)) == 1
        assert threads_of(lambda: linear(*more_rows)) == 2
        torch.set_num_threads(1)
        assert threads_of(lambda: linear(*large)) == 1
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 4, 20])
def test_opcheck(dtype: torch.dtype, rows: int) -> None:
    x, weight, bias = make(rows, 24, 40, dtype)
    for args in ((x, weight), (x, weight, bias), (x.reshape(-1, 1, 40), inside(weight), bias)):
        torch.library.opcheck(linear.default, args)


def test_schema_and_reference() -> None:
    from liteboost_adaptor.ops.registry import ops

    assert str(linear.default._schema) == "liteboost::" + ops()["linear"].schema
    x, weight, bias = (tensor.double() for tensor in make(3, 5, 7, torch.float32))
    assert torch.equal(reference(x, weight, bias), F.linear(x, weight, bias))
    args = make(3, 5, 7, torch.bfloat16)
    check(reference(*args), *args)


def test_compiles_whole() -> None:
    args = make(2, 24, 40, torch.float32)
    compiled = torch.compile(lambda *a: linear(*a) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*args), linear(*args) + 1)


def test_autocast_does_not_change_the_dtype(native_only: None) -> None:
    for rows in (2, 20):
        args = make(rows, 24, 40, torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            result = linear(*args)
        assert torch.equal(result, linear(*args))


X, W, B = torch.zeros(2, 8), torch.zeros(4, 8), torch.zeros(4)
BAD = {
    "x_scalar": ((torch.tensor(1.0), W), ValueError, r"x must have shape .*got a scalar"),
    "x_size": ((torch.zeros(2, 7), W), ValueError, r"x must have shape .*in_features = 8.*got \[2, 7\]"),
    "weight_dim": ((X, torch.zeros(8)), ValueError, r"weight must have shape .*got \[8\]"),
    "bias_shape": ((X, W, torch.zeros(8)), ValueError, r"bias must have shape .*= \[4\], got \[8\]"),
    "bias_dim": ((X, W, torch.zeros(4, 1)), ValueError, r"bias must have shape .*got \[4, 1\]"),
    "weight_dtype": ((X, W.bfloat16()), TypeError, r"weight must have the dtype of x .*got"),
    "bias_dtype": ((X, W, B.half()), TypeError, r"bias must have the dtype of x .*got"),
    "weight_device": ((X, W.to("meta")), ValueError, r"weight must be on the device of x \(cpu\), got meta"),
    "bias_device": ((X, W, B.to("meta")), ValueError, r"bias must be on the device of x \(cpu\), got meta"),
    "integer": ((X.int(), W.int()), TypeError, r"x must be float32, bfloat16 or float16, got"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_op_and_argument(case: str) -> None:
    args, kind, text = BAD[case]
    assert_refused((linear, reference), args, kind, f"liteboost::linear: {text}")


def test_float64_is_the_references_alone(native_only: None) -> None:
    with pytest.raises(TypeError, match=r"liteboost::linear: x must be float32, bfloat16 or float16, got"):
        linear(X.double(), W.double())


@pytest.mark.parametrize("argument", ["x", "weight", "bias"])
@pytest.mark.parametrize("rows", [2, 20])
def test_no_backward_is_an_error_in_grad_mode_only(argument: str, rows: int) -> None:
    named = dict(zip(("x", "weight", "bias"), make(rows, 4, 8, torch.float32), strict=True))
    named[argument].requires_grad_()
    with pytest.raises(
        RuntimeError, match=rf"liteboost::linear: has no backward, but (an argument|{argument}) requires grad"
    ):
        linear(**named)
    with torch.no_grad():
        assert not linear(**named).requires_grad
    with torch.inference_mode():
        linear(**named)


def test_stream_sum(native_only: None) -> None:
    x = torch.ones(100_003)
    assert torch.ops.liteboost._stream_sum(x) == 100_003
    with pytest.raises(TypeError, match=r"liteboost::_stream_sum: x must be float32"):
        torch.ops.liteboost._stream_sum(x.double())
    with pytest.raises(ValueError, match=r"liteboost::_stream_sum: x must be contiguous"):
        torch.ops.liteboost._stream_sum(x[::2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 16, 40, 100])
def test_several_at_once_give_the_bits_of_each(
    isa: str, native_only: None, dtype: torch.dtype, rows: int
) -> None:
    x, turned = torch.randn(1, rows, 96).to(dtype), torch.randn(96, 20).to(dtype).T
    weights = [torch.randn(n, 96).to(dtype) for n in (37, 16, 1, 0, 300)]
    padded = torch.randn(30, 200).to(dtype)[:, 60:156]
    strided = torch.randn(600).to(dtype)[::2]
    for given in (weights, weights[3:4], [padded, *weights], [turned, *weights]):
        biases = [strided[: len(weight)] if i % 2 else None for i, weight in enumerate(given)]
        for each, weight, bias in zip(linears(x, given, biases), given, biases, strict=True):
            assert torch.equal(each, linear(x, weight, bias)) and each.is_contiguous()
    apart = torch.randn(rows, 192).to(dtype)[:, ::2]
    for each, weight in zip(linears(apart, weights, [None] * 5), weights, strict=True):
        assert torch.equal(each, linear(apart, weight))
    for each in linears(x[..., :0], [weight[:, :0] for weight in weights], [strided[:37], *[None] * 4]):
        wanted = strided[:37] if each.shape[-1] == 37 else each.new_zeros(())
        assert torch.equal(each, wanted.expand_as(each))


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_several_at_once_are_shared_out_over_any_number_of_threads(native_only: None, rows: int) -> None:
    x = torch.randn(rows, 512).bfloat16()
    weights = [torch.randn(n, 512).bfloat16() for n in (2048, 1023, 1024, 16)]
    assert_same_on_any_threads(lambda: torch.cat(linears(x, weights, [None] * 4), -1))


def test_several_at_once_refuse_lists_that_do_not_fit(native_only: None) -> None:
    x, weight, _ = make(2, 8, 16, torch.float32)
    with pytest.raises(ValueError, match=r"one element for each layer.* got 1 weights, 2 biases"):
        linears(x, [weight], [None, None])
    with pytest.raises(ValueError, match="at least one"):
        linears(x, [], [])
    with pytest.raises(ValueError, match="in_features"):
        linears(x, [weight, weight[:, 1:]], [None, None])
