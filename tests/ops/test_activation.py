"""`liteboost::activation` and `gated_activation` against float64, at every instruction set and layout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.compare import (
    DTYPES,
    NOISE,
    SIZES,
    assert_close,
    assert_refused,
    assert_same_on_any_threads,
    same_bits,
    sentinel_view,
)
from torch import Tensor

from liteboost_adaptor.ops.activation import ACTIVATIONS
from liteboost_adaptor.ops.activation import activation as reference_alone
from liteboost_adaptor.ops.activation import gated_activation as reference

op = torch.ops.liteboost.gated_activation
alone = torch.ops.liteboost.activation

ACTS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
}
GPT_OSS = {"alpha": 1.702, "limit": 7.0, "up_offset": 1.0}


def make(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    gate, up = torch.randn(2, *shape, dtype=torch.float32).mul(3).to(dtype)
    return gate, up


def exact(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    gate, up = gate.double(), up.double()
    if activation == "gelu":  # torch's own cancels below -5, also in float64
        return gate * torch.special.erfc(-gate / 2**0.5) / 2 * up
    if activation == "gelu_tanh":
        return gate * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)) * up
    return ACTS[activation](gate) * up


def gpt_oss(gate: Tensor, up: Tensor) -> Tensor:
    """The lines of ``GptOssExperts``."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_at_every_length(isa: str, dtype: torch.dtype, size: int, activation: str) -> None:
    gate, up = make((3, size), dtype)
    # The tanh form takes the exponential of a cubic, whose rounding grows with it.
    noise = 200 * 2.0**-24 if activation == "gelu_tanh" else NOISE
    original = ACTS[activation](gate) * up
    assert_close(op(gate, up, activation), exact(gate, up, activation), original, noise=noise)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_whole_range_of_the_gate(isa: str, dtype: torch.dtype, activation: str) -> None:
    gate = torch.linspace(-30, 30, 40_001).to(dtype)
    up = torch.ones_like(gate)
    result, want = op(gate, up, activation), exact(gate, up, activation)
    info = torch.finfo(dtype)
    # An exponential of a rounded argument: the relative error grows with the argument.
    noise = (16 + 4 * gate.double().abs()) * 2.0**-24 + (0 if dtype == torch.float32 else 5e-5)
    if activation == "gelu_tanh":  # its argument is a cubic
        noise += 2.0**-23 * gate.double().abs() ** 3
    bound = (info.eps / 2 * 1.01 + noise) * want.abs() + max(info.smallest_normal * info.eps, 1e-36)
    assert bool(((result.double() - want).abs() <= bound).all())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_special_values(isa: str, activation: str) -> None:
    gate = torch.tensor([float("nan"), float("inf"), -200.0, 200.0, 0.0, -0.0, 3e38, -3e38] * 3)
    result = op(gate, torch.ones_like(gate), activation)
    want = torch.tensor([float("nan"), float("inf"), 0.0, 200.0, 0.0, 0.0, 3e38, 0.0] * 3)
    if activation == "relu2":
        want = want.square()
    elif activation == "sigmoid":
        want = torch.tensor([float("nan"), 1.0, 0.0, 1.0, 0.5, 0.5, 1.0, 0.0] * 3)
    torch.testing.assert_close(result, want, equal_nan=True, rtol=1e-6, atol=1e-30)
    torch.testing.assert_close(alone(gate, activation), want, equal_nan=True, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_alone_it_is_gated_by_one(isa: str, dtype: torch.dtype, size: int, activation: str) -> None:
    x, _ = make((3, 2, size), dtype)
    want = op(x, torch.ones_like(x), activation)
    views = {
        "contiguous": x,
        "transposed": x.mT.contiguous().mT,
        "rows apart": torch.cat((x, x), -1)[..., :size],
        "every other": torch.stack((x, x), -1)[..., 0],
        "sentinels": sentinel_view(x),
    }
    for name, view in views.items():
        result = alone(view, activation)
        assert result.is_contiguous() and same_bits(result, want), name
    torch.testing.assert_close(reference_alone(x, activation), want)
    if size:
        assert same_bits(alone(x[0, 0, 0], activation), want[0, 0, 0])  # a scalar


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 65, 1000])
@pytest.mark.parametrize("interleaved", [False, True])
def test_clamped_form_of_gpt_oss(isa: str, dtype: torch.dtype, size: int, interleaved: bool) -> None:
    both = torch.randn(5, 2 * size).mul(6).to(dtype)
    gate, up = (both[:, ::2], both[:, 1::2]) if interleaved else both.chunk(2, -1)
    result = op(gate, up, "silu", **GPT_OSS)
    # alpha * gate is rounded before its exponential.
    assert_close(result, gpt_oss(gate.double(), up.double()), gpt_oss(gate, up), noise=100 * 2.0**-24)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_layouts_give_the_same_bits(isa: str, dtype: torch.dtype, activation: str) -> None:
    gate, up = make((4, 6, 77), dtype)
    want = op(gate, up, activation)
    halves = torch.cat((gate, up), -1)
    pairs = torch.stack((gate, up), -1).flatten(-2)
    layouts = {
        "halves": (halves[..., :77], halves[..., 77:]),
        "pairs": (pairs[..., ::2], pairs[..., 1::2]),
        "pairs, one contiguous": (pairs[..., ::2], up),
        "pairs, exchanged": (up.clone().copy_(gate), torch.stack((up, gate), -1)[..., 0]),
        "transposed": (gate.mT.contiguous().mT, up),
        "middle slice": (torch.cat((gate, gate), 1)[:, :6], up),
        "sentinels": (sentinel_view(gate), sentinel_view(up)),
    }
    for name, (g, u) in layouts.items():
        assert same_bits(op(g, u, activation), want), name
    expanded = gate[:1].expand(4, -1, -1)
    assert same_bits(op(expanded, up, activation), op(expanded.contiguous(), up, activation))


def test_arguments_are_not_written(isa: str) -> None:
    gate, up = make((3, 65), torch.bfloat16)
    before = gate.clone(), up.clone()
    op(gate, up)
    assert torch.equal(gate, before[0]) and torch.equal(up, before[1])


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (2, 0, 3)])
def test_empty(isa: str, shape: tuple[int, ...]) -> None:
    result = op(torch.empty(shape), torch.empty(shape))
    assert result.shape == shape


def test_result_does_not_depend_on_threads() -> None:
    gate, up = make((37, 4096 + 13), torch.bfloat16)
    assert_same_on_any_threads(lambda: op(gate, up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_reference_agrees(dtype: torch.dtype, activation: str) -> None:
    gate, up = make((3, 1000), dtype)
    kwargs = GPT_OSS if activation == "silu" else {"limit": 2.0}
    torch.testing.assert_close(op(gate, up, activation, **kwargs), reference(gate, up, activation, **kwargs))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            (torch.ones(2, 4), torch.ones(2, 3)),
            ValueError,
            r"up must have the shape of gate = \[2, 4\], got \[2, 3\]",
        ),
        (
            (torch.ones(4), torch.ones(4).half()),
            TypeError,
            r"up must have the dtype of gate \(float32\), got float16",
        ),
        (
            (torch.ones(4).long(), torch.ones(4).long()),
            TypeError,
            "gate must be float32, bfloat16 or float16, got int64",
        ),
        ((torch.ones(()), torch.ones(())), ValueError, "gate must have at least one dimension"),
        (
            (torch.ones(4), torch.ones(4, device="meta")),
            ValueError,
            r"up must be on the device of gate \(cpu\), got meta",
        ),
        (
            (torch.ones(4), torch.ones(4), "swish"),
            ValueError,
            "activation must be one of silu, gelu, .*got 'swish'",
        ),
        (
            (torch.ones(4), torch.ones(4), "gelu", 1.7),
            ValueError,
            "alpha must be 1 unless activation is 'silu', got",
        ),
        ((torch.ones(4), torch.ones(4), "silu", 1.0, -1.0), ValueError, "limit must not be negative, got -1"),
    ],
    ids=lambda value: "" if not isinstance(value, str) else value.split(" ")[0],
)
def test_bad_arguments(arguments: tuple, error: type[Exception], text: str) -> None:
    assert_refused((op, reference), arguments, error, f"liteboost::gated_activation: {text}")


@pytest.mark.parametrize("function", [alone, reference_alone], ids=["op", "reference"])
def test_bad_arguments_alone(function) -> None:
    with pytest.raises(ValueError, match=r"liteboost::activation: activation must be .*'swish'; pass one"):
        function(torch.ones(4), "swish")
    with pytest.raises(ValueError, match=r"liteboost::activation: alpha must be 1 .*; leave alpha out"):
        function(torch.ones(4), "relu", 2.0)
    with pytest.raises(TypeError, match="liteboost::activation: x must be float32"):
        function(torch.ones(4).long(), "relu")
    with pytest.raises(RuntimeError, match="liteboost::activation: has no backward"):
        alone(torch.ones(4, requires_grad=True), "relu")


def test_float64_is_refused_by_the_kernel(native_only: None) -> None:
    with pytest.raises(TypeError, match="gate must be float32, bfloat16 or float16, got float64"):
        op(torch.ones(4).double(), torch.ones(4).double())


def test_gradient_is_refused(isa: str) -> None:
    gate, up = make((2, 5), torch.float32)
    gate.requires_grad_()
    with pytest.raises(RuntimeError, match="liteboost::gated_activation: has no backward"):
        op(gate, up)
    with torch.no_grad():
        assert not op(gate, up).requires_grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    both = torch.randn(3, 66).to(dtype)
    torch.library.opcheck(op, make((3, 33), dtype))
    torch.library.opcheck(op, (both[:, ::2], both[:, 1::2], "silu"), GPT_OSS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_opcheck_alone(dtype: torch.dtype, activation: str) -> None:
    # Which instruction set computes it, and how many numbers, is nothing that tracing sees.
    for size in (0, 33):
        torch.library.opcheck(alone, (torch.randn(3, 2, size).to(dtype), activation))
