"""The norms against float64, their rounding orders against the originals, at every instruction set."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.compare import (
    DTYPES,
    SIZES,
    assert_close,
    assert_refused,
    assert_same_on_any_threads,
    same_bits,
    sentinel_view,
)
from torch import Tensor

from liteboost_adaptor.ops import norm

ops = torch.ops.liteboost
EPS = 1e-6

# dtype of x, dtype of weight
PAIRS = [(dtype, weight) for dtype in DTYPES for weight in dict.fromkeys((dtype, torch.float32))]


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=torch.float32).to(dtype)


def llama(x: Tensor, weight: Tensor | None, eps: float = EPS) -> Tensor:
    """``LlamaRMSNorm.forward``, which computes in fp32; in float64 for float64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) if weight is None else weight * wide.to(x.dtype)


def gemma(x: Tensor, weight: Tensor, offset: float = 1.0, eps: float = EPS) -> Tensor:
    """``Gemma2RMSNorm.forward``; with offset 0 ``Olmo2RMSNorm.forward``."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (offset + weight.to(wide.dtype))).to(x.dtype)


def qwen3_next(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """``Qwen3NextRMSNormGated.forward``."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (llama(x, weight) * F.silu(gate.to(wide))).to(x.dtype)


def mamba2(x: Tensor, gate: Tensor, weight: Tensor, groups: int = 1) -> Tensor:
    """``MambaRMSNormGated.forward``, by groups as ``Zamba2RMSNormGated`` does it."""
    wide = torch.promote_types(x.dtype, torch.float32)
    h = (x.to(wide) * F.silu(gate.to(wide))).unflatten(-1, (groups, -1))
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * h.flatten(-2).to(x.dtype)


def differing(a: Tensor, b: Tensor, eps: float) -> float:
    """The share of elements that differ; they may by about one rounding, of ``eps``, only."""
    torch.testing.assert_close(a, b, rtol=2 * eps, atol=1e-7)
    return (a != b).double().mean().item()


@pytest.mark.parametrize(("dtype", "weight_dtype"), PAIRS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm_values(isa: str, dtype: torch.dtype, weight_dtype: torch.dtype, size: int) -> None:
    x, weight = randn(3, size, dtype=dtype), randn(size, dtype=weight_dtype)
    early = ops.rms_norm(x, weight, EPS)
    assert early.dtype == weight_dtype
    # The row is rounded to the dtype of x also where the result is wider.
    rounded = torch.finfo(dtype).eps / 2 if weight_dtype != dtype else 0.0
    want = llama(x.double(), weight.double())
    assert_close(early, want, llama(x, weight), roundings=2, noise=12 * 2.0**-24 + 1.01 * rounded)
    late = ops.rms_norm(x, weight, EPS, 1.0, True)
    assert late.dtype == dtype
    assert_close(late, gemma(x.double(), weight.double()), gemma(x, weight))
    bare = ops.rms_norm(x, None, EPS)
    assert_close(bare, llama(x.double(), None), llama(x, None))


@pytest.mark.parametrize(("dtype", "weight_dtype"), PAIRS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_add_rms_norm_values(isa: str, dtype: torch.dtype, weight_dtype: torch.dtype, size: int) -> None:
    x, residual = randn(3, size, dtype=dtype), randn(3, size, dtype=dtype)
    weight = randn(size, dtype=weight_dtype)
    for arguments in ((), (1.0, True), (0.5, False)):
        normed, total = ops.add_rms_norm(x, residual, weight, EPS, *arguments)
        assert same_bits(total, x + residual)
        assert same_bits(normed, ops.rms_norm(total, weight, EPS, *arguments))


@pytest.mark.parametrize(("dtype", "weight_dtype"), PAIRS, ids=str)
@pytest.mark.parametrize(("groups", "size"), [(1, 7), (3, 65), (5, 64), (2, 1000)])
def test_weights_of_groups(
    isa: str, dtype: torch.dtype, weight_dtype: torch.dtype, groups: int, size: int
) -> None:
    """Each group gives what it gives alone; rows apart, so that no group starts where its neighbour ends."""
    x = sentinel_view(randn(2, 4, groups, size, dtype=dtype))
    weight = torch.cat(2 * [randn(groups, size, dtype=weight_dtype)], -1)[:, :size]
    for arguments in ((), (1.0, True), (0.5, False)):
        result = ops.rms_norm(x, weight, EPS, *arguments)
        normed, total = ops.add_rms_norm(x, x, weight, EPS, *arguments)
        assert result.is_contiguous() and result.shape == x.shape
        for group in range(groups):
            row = weight[group].contiguous()
            assert same_bits(result[:, :, group], ops.rms_norm(x[:, :, group], row, EPS, *arguments))
            assert same_bits(normed[:, :, group], ops.rms_norm(total[:, :, group], row, EPS, *arguments))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_inverse_rms_values(isa: str, dtype: torch.dtype, size: int) -> None:
    x = randn(4, 37, size, dtype=dtype)
    result = ops.inverse_rms(x, EPS)
    assert result.shape == (4, 37, 1) and result.dtype == dtype
    if size == 0:
        assert result.isnan().all()
        return
    exact = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS)
    original = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS).to(dtype)
    assert_close(result, exact, original)
    if dtype != torch.float32:
        assert differing(result, original, torch.finfo(dtype).eps) < 0.01
    assert same_bits(ops.inverse_rms(sentinel_view(x), EPS), result)
    assert same_bits(ops.inverse_rms(x.transpose(0, 1), EPS), result.transpose(0, 1))


def test_inverse_rms_has_no_backward_and_takes_no_rows(isa: str) -> None:
    with pytest.raises(RuntimeError, match="has no backward"):
        ops.inverse_rms(torch.ones(3, 64, requires_grad=True), EPS)
    assert ops.inverse_rms(torch.empty(0, 5), EPS).shape == (0, 1)


@pytest.mark.parametrize(("dtype", "weight_dtype"), PAIRS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_layer_norm_values(isa: str, dtype: torch.dtype, weight_dtype: torch.dtype, size: int) -> None:
    x = randn(3, size, dtype=dtype)
    weight, bias = randn(2, size, dtype=weight_dtype)
    exact = F.layer_norm(x.double(), (size,), None, None, 1e-5) if size else x.double()
    original = F.layer_norm(x.float(), (size,), None, None, 1e-5).to(dtype) if size else x
    # Relative to the terms, not to their sum: mean and bias cancel.
    scale = (exact.abs() * weight.double().abs() + bias.double().abs() + 1) if size else x.double()
    result = ops.layer_norm(x, weight, bias, 1e-5)
    want = exact * weight.double() + bias.double()
    unit = torch.finfo(dtype).eps / 2
    assert result.dtype == dtype and result.is_contiguous()
    assert bool(((result.double() - want).abs() <= 1.01 * unit * want.abs() + 12 * 2.0**-24 * scale).all())
    bare = ops.layer_norm(x, None, None, 1e-5)
    assert bool(((bare.double() - exact).abs() <= 1.01 * unit * exact.abs() + 12 * 2.0**-24 * scale).all())
    if size >= 60:
        ours, theirs = (bare.double() - exact).norm(), (original.double() - exact).norm()
        assert ours <= 1.5 * theirs + 2.0**-23 * exact.norm()
    scaled = ops.layer_norm(x, weight, None, 1e-5).double()
    torch.testing.assert_close(scaled, exact * weight.double(), rtol=4 * unit, atol=2e-6)
    shifted = ops.layer_norm(x, None, bias, 1e-5).double()
    torch.testing.assert_close(shifted, exact + bias.double(), rtol=4 * unit, atol=4e-6)


@pytest.mark.parametrize("size", [64, 1000])
def test_layer_norm_of_a_row_with_a_large_mean(isa: str, size: int) -> None:
    x = torch.randn(4, size) + 1000.0
    exact = F.layer_norm(x.double(), (size,), None, None, 1e-5)
    assert (ops.layer_norm(x, None, None, 1e-5).double() - exact).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 65, 1000, 4096 + 13])
@pytest.mark.parametrize("activation", norm.GATES)
def test_gated_rms_norm_values(isa: str, dtype: torch.dtype, size: int, activation: str) -> None:
    x, gate, weight = *randn(2, 5, size, dtype=dtype), randn(size, dtype=dtype)
    act = F.silu if activation == "silu" else torch.sigmoid
    exact = llama(x.double(), weight.double()) * act(gate.double())
    after = (llama(x, weight) * act(gate.float())).to(dtype)
    assert_close(ops.gated_rms_norm(x, gate, weight, EPS, activation), exact, after, roundings=3)
    late = ops.gated_rms_norm(x, gate, weight, EPS, activation, late=True)
    wide = (gemma(x.float(), weight.float(), 0.0) * act(gate.float())).to(dtype)
    assert_close(late, exact, wide)
    h = x.double() * act(gate.double())
    exact = llama(h, weight.double())
    h32 = x.float() * act(gate.float())
    first = ops.gated_rms_norm(x, gate, weight, EPS, activation, gate_first=True)
    assert_close(first, exact, weight * llama(h32, None).to(dtype), roundings=2)
    first_late = ops.gated_rms_norm(x, gate, weight, EPS, activation, gate_first=True, late=True)
    assert_close(first_late, exact, (llama(h32, None) * weight.float()).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "groups"), [(96, 3), (65, 5), (1024, 8), (1000, 1)])
def test_gated_rms_norm_in_groups(isa: str, dtype: torch.dtype, size: int, groups: int) -> None:
    x, gate, weight = *randn(2, 5, size, dtype=dtype), randn(size, dtype=dtype)
    result = ops.gated_rms_norm(x, gate, weight, EPS, gate_first=True, group_size=size // groups)
    exact = mamba2(x.double(), gate.double(), weight.double(), groups)
    assert_close(result, exact, mamba2(x, gate, weight, groups), roundings=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_orders_are_those_of_the_originals(isa: str, dtype: torch.dtype) -> None:
    x, gate = randn(2, 32, 1000, dtype=dtype)
    narrow, wide = randn(1000, dtype=dtype), randn(1000, dtype=torch.float32)
    eps = torch.finfo(dtype).eps
    # Only where fp32 noise tips a rounding may they differ; another order shows in a tenth of the elements.
    for weight in (narrow, wide):
        pairs = [
            (ops.rms_norm(x, weight, EPS), llama(x, weight)),
            (ops.rms_norm(x, weight, EPS, 1.0, True), gemma(x, weight)),
            (ops.rms_norm(x, weight, EPS, 0.0, True), gemma(x, weight, 0.0)),
            (ops.gated_rms_norm(x, gate, weight, EPS), qwen3_next(x, gate, weight)),
            (ops.gated_rms_norm(x, gate, weight, EPS, gate_first=True), mamba2(x, gate, weight)),
        ]
        assert [differing(ours, theirs, eps) < 0.005 for ours, theirs in pairs] == [True] * 5
    early = ops.rms_norm(x, narrow, EPS)
    assert (early != ops.rms_norm(x, narrow, EPS, 0.0, True)).double().mean() > 0.1
    offset = ops.rms_norm(x, narrow, EPS, 1.0)
    assert differing(offset, (1.0 + narrow.float()).to(dtype) * llama(x, None), eps) < 0.005


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_scales_and_outliers(isa: str, dtype: torch.dtype, scale: float) -> None:
    x = torch.randn(6, 1000)
    x[0] = 0.0
    x[1, 17] = 300.0
    x = (x * scale).clamp(-6e4, 6e4).to(dtype)
    weight = torch.ones(1000, dtype=dtype)
    assert_close(ops.rms_norm(x, weight, EPS), llama(x.double(), weight.double()), llama(x, weight), 2)
    assert torch.count_nonzero(ops.rms_norm(x, weight, EPS)[0]) == 0
    assert ops.layer_norm(x, None, None, EPS).isfinite().all()


def test_special_values_stay_in_their_row(isa: str) -> None:
    x = torch.randn(3, 65)
    x[1, 3], x[2, 64] = float("nan"), float("inf")
    for result in (ops.rms_norm(x, None, EPS), ops.layer_norm(x, None, None, EPS)):
        assert result[0].isfinite().all() and result[1].isnan().all() and result[2].isnan().any()


CALLS = {
    "rms_norm": lambda x, y, w: ops.rms_norm(x, w, EPS),
    "rms_norm late": lambda x, y, w: ops.rms_norm(x, w, EPS, 1.0, True),
    "add_rms_norm": lambda x, y, w: torch.stack(ops.add_rms_norm(x, y, w, EPS)),
    "gated_rms_norm": lambda x, y, w: ops.gated_rms_norm(x, y, w, EPS),
    "gated_rms_norm first": lambda x, y, w: ops.gated_rms_norm(x, y, w, EPS, gate_first=True),
    "layer_norm": lambda x, y, w: ops.layer_norm(x, w, w, EPS),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_layouts_give_the_same_bits(isa: str, dtype: torch.dtype, call) -> None:
    x, y = randn(2, 4, 6, 77, dtype=dtype)
    weight = randn(77, dtype=dtype)
    want = call(x, y, weight)
    views = {
        "sentinels": (sentinel_view(x), sentinel_view(y), sentinel_view(weight)),
        "rows apart": (torch.cat((x, y), -1)[..., :77], torch.cat((x, y), -1)[..., 77:], weight),
        "middle slice": (torch.cat((x, x), 1)[:, :6], y, weight),
        "transposed": (x.mT.contiguous().mT, y.transpose(0, 1).contiguous().transpose(0, 1), weight),
        "strided weight": (x, y, torch.stack((weight, weight), -1)[:, 0]),
    }
    for name, arguments in views.items():
        assert same_bits(call(*arguments), want), name
    expanded = x[:1].expand(4, -1, -1)
    assert same_bits(call(expanded, y, weight), call(expanded.contiguous(), y, weight))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_arguments_are_not_written(isa: str, call) -> None:
    arguments = *randn(2, 3, 65, dtype=torch.bfloat16), randn(65, dtype=torch.bfloat16)
    before = [argument.clone() for argument in arguments]
    call(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(arguments, before, strict=True))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (2, 0, 3)])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_empty(isa: str, shape: tuple[int, ...], call) -> None:
    result = call(torch.empty(shape), torch.empty(shape), torch.empty(shape[-1]))
    assert result.shape[-len(shape) :] == shape


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_result_does_not_depend_on_threads(call) -> None:
    arguments = *randn(2, 37, 4096 + 13, dtype=torch.bfloat16), randn(4096 + 13, dtype=torch.bfloat16)
    assert_same_on_any_threads(lambda: call(*arguments))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_references_agree(dtype: torch.dtype) -> None:
    x, y, weight = *randn(2, 3, 96, dtype=dtype), randn(96, dtype=dtype)
    calls = [
        ("rms_norm", (x, weight, EPS), {}),
        ("rms_norm", (x, weight.float(), EPS, 1.0, True), {}),
        ("rms_norm", (x, weight.float(), EPS, 1.0), {}),
        ("rms_norm", (x, None, EPS), {}),
        ("add_rms_norm", (x, y, weight, EPS), {}),
        ("gated_rms_norm", (x, y, weight, EPS), {}),
        ("gated_rms_norm", (x, y, weight.float(), EPS, "sigmoid"), {}),
        ("gated_rms_norm", (x, y, weight, EPS), {"late": True}),
        ("gated_rms_norm", (x, y, weight.float(), EPS), {"gate_first": True, "group_size": 32}),
        ("gated_rms_norm", (x, y, weight, EPS), {"gate_first": True, "late": True}),
        ("rms_norm", (x, torch.stack((weight, -weight, weight)), EPS), {}),
        ("inverse_rms", (x, EPS), {}),
        ("layer_norm", (x, weight, weight, EPS), {}),
        ("layer_norm", (x, None, weight.float(), EPS), {}),
    ]
    for name, args, kwargs in calls:
        result, want = getattr(ops, name)(*args, **kwargs), getattr(norm, name)(*args, **kwargs)
        torch.testing.assert_close(result, want, rtol=2 * torch.finfo(dtype).eps, atol=2e-6)


X, W = torch.ones(2, 64), torch.ones(64)
BAD = [
    (
        "rms_norm",
        (X, W[:32], EPS),
        ValueError,
        r"weight must have shape \[hidden_size\] = \[64\], got \[32\]",
    ),
    ("rms_norm", (X, torch.ones(1, 64), EPS), ValueError, r"weight must have shape .*got \[1, 64\]"),
    (
        "rms_norm",
        (X, torch.ones(3, 64), EPS),
        ValueError,
        r"weight must have shape \[groups, hidden_size\] = the last two of x = \[2, 64\], got \[3, 64",
    ),
    ("rms_norm", (X.half(), W.bfloat16(), EPS), TypeError, r"weight must have the dtype of x \(float16\) or"),
    ("rms_norm", (X.int(), W, EPS), TypeError, "x must be float32, bfloat16 or float16, got int32"),
    ("rms_norm", (X, W, -1.0), ValueError, "eps must not be negative, got -1"),
    (
        "rms_norm",
        (torch.ones(()), None, EPS),
        ValueError,
        "x must have at least one dimension, got a scalar; pass",
    ),
    ("inverse_rms", (X, -1.0), ValueError, "eps must not be negative, got -1"),
    ("rms_norm", (X, W.to("meta"), EPS), ValueError, r"weight must be on the device of x \(cpu\), got meta"),
    (
        "add_rms_norm",
        (X, X[:1], W, EPS),
        ValueError,
        r"residual must have the shape of x = \[2, 64\], got \[1",
    ),
    ("add_rms_norm", (X, X.half(), W, EPS), TypeError, r"residual must have the dtype of x \(float32\), got"),
    ("gated_rms_norm", (X, X.mT, W, EPS), ValueError, "gate must have the shape of x"),
    ("gated_rms_norm", (X, X, W, EPS, "gelu"), ValueError, "activation must be .* 'gelu'; use the plain"),
    (
        "gated_rms_norm",
        (X, X, W, EPS, "silu", True, False, 5),
        ValueError,
        "group_size must divide hidden_size",
    ),
    (
        "gated_rms_norm",
        (X, X, W, EPS, "silu", False, False, 8),
        ValueError,
        "group_size must be 0 unless gate_first is True, got 8; pass",
    ),
    ("layer_norm", (X, W, W.half(), EPS), TypeError, "bias must have the dtype of"),
    (
        "layer_norm",
        (X, None, W[:3], EPS),
        ValueError,
        r"bias must have shape \[hidden_size\] = \[64\], got \[3",
    ),
]


@pytest.mark.parametrize(
    ("name", "arguments", "error", "text"), BAD, ids=[f"{b[0]} {b[3][:20]}" for b in BAD]
)
def test_bad_arguments(name: str, arguments: tuple, error: type[Exception], text: str) -> None:
    assert_refused((getattr(ops, name), getattr(norm, name)), arguments, error, f"liteboost::{name}: {text}")


def test_float64_is_refused_by_the_kernels(native_only: None) -> None:
    with pytest.raises(TypeError, match="x must be float32, bfloat16 or float16, got float64"):
        ops.rms_norm(X.double(), None, EPS)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_gradient_is_refused(isa: str, call) -> None:
    weight = torch.ones(64, requires_grad=True)
    with pytest.raises(RuntimeError, match="has no backward"):
        call(X, X, weight)
    with torch.no_grad():
        assert not call(X, X, weight).requires_grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    x, y, weight = *randn(2, 3, 4, 33, dtype=dtype), randn(33, dtype=dtype)
    torch.library.opcheck(ops.rms_norm, (x, weight, EPS))
    torch.library.opcheck(ops.rms_norm, (x.transpose(0, 1), weight.float(), EPS, 1.0, True))
    torch.library.opcheck(ops.add_rms_norm, (x, y, weight.float(), EPS))
    torch.library.opcheck(ops.gated_rms_norm, (x, y, weight, EPS))
    torch.library.opcheck(ops.gated_rms_norm, (x, y, weight.float(), EPS, "sigmoid", True, False, 11))
    torch.library.opcheck(ops.rms_norm, (x, torch.stack(4 * [weight]), EPS, 1.0, True))
    torch.library.opcheck(ops.inverse_rms, (x.transpose(0, 1), EPS))
    torch.library.opcheck(ops.layer_norm, (x, weight, None, EPS))
