"""Norms and gated activations of the simulator that end in a quantization, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from .operators import call, close, integers, normal, on_soc, refused, rounded

HALVES = (torch.float16, torch.bfloat16)


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * gamma


# ---- norm, then quantize ---------------------------------------------------------------------------------


def residual(dtype, seed, shape=(2, 3, 72)):
    x1, x2 = normal(shape, dtype, seed), normal(shape, dtype, seed + 1)
    gamma = normal(shape[-1:], dtype, seed + 2)
    return x1, x2, gamma, (x1.double() + x2.double()).to(dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("second", [False, True])
def test_add_rms_norm_quant(dtype, second):
    x1, x2, gamma, x = residual(dtype, 20)
    half = dtype == torch.float16
    scale = (normal((72,), torch.float32, 23).abs() * 0.01 + 0.02).to(torch.float32 if half else dtype)
    zero = integers(-20, 20, (72,), 24, torch.int32 if half else dtype)
    y1, y2, out = (torch.full(x1.shape, 1, dtype=d) for d in (torch.int8, torch.int8, dtype))
    call(
        "aclnnAddRmsNormQuant",
        x1,
        x2,
        gamma,
        scale,
        scale if second else None,
        zero,
        None,
        -1,
        1e-6,
        True,
        y1,
        y2,
        out,
    )
    assert torch.equal(out, x)
    normed = rms_norm(x.double(), gamma.double(), 1e-6)
    rounded(y1, normed / scale.double() + zero.double(), slack=2e-3)
    if second:
        rounded(y2, normed / scale.double(), slack=2e-3)
    else:
        assert (y2 == 1).all()


def test_add_rms_norm_quant_with_beta_gives_the_norm_too():
    x1, x2, gamma, x = residual(torch.float16, 30)
    beta, scale = normal((72,), torch.float16, 33), torch.full((72,), 0.05)
    y1, y2 = torch.empty(x.shape, dtype=torch.int8), torch.empty(x.shape, dtype=torch.int8)
    out, normed = torch.empty_like(x), torch.empty_like(x)
    call(
        "aclnnAddRmsNormQuantV2",
        x1,
        x2,
        gamma,
        scale,
        None,
        None,
        None,
        beta,
        -1,
        1e-6,
        True,
        y1,
        y2,
        out,
        normed,
    )
    real = rms_norm(x.double(), gamma.double(), 1e-6) + beta.double()
    close(normed, real)
    rounded(y1, real / scale.double(), slack=2e-3)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("mask", [None, (True, False), (False, True), (True, True)])
def test_add_rms_norm_dynamic_quant(dtype, mask):
    x1, x2, gamma, x = residual(dtype, 40)
    beta = normal((72,), dtype, 43)
    smooth = [normal((72,), dtype, 44 + k).abs() + 0.5 for k in range(2)]
    given = [s if mask is None or mask[k] else None for k, s in enumerate(smooth)]
    y = [torch.full(x.shape, 7, dtype=torch.int8) for _ in range(2)]
    scale = [torch.full(x.shape[:-1], 7.0) for _ in range(2)]
    out = torch.empty_like(x)
    call("aclnnAddRmsNormDynamicQuantV2", x1, x2, gamma, *given, beta, 1e-5, mask, *y, out, *scale)
    assert torch.equal(out, x)
    normed = rms_norm(x.double(), gamma.double(), 1e-5) + beta.double()
    for k in range(2):
        if given[k] is None:
            assert (y[k] == 7).all() and (scale[k] == 7).all()
            continue
        real = normed * smooth[k].double()
        s = real.abs().amax(-1) / 127
        close(scale[k], s, roundings=4)
        rounded(y[k], real / s.unsqueeze(-1))


def test_add_rms_norm_dynamic_quant_without_smoothing_has_one_output():
    x1, x2, gamma, x = residual(torch.bfloat16, 50)
    y, scale = torch.empty(x.shape, dtype=torch.int8), torch.empty(x.shape[:-1])
    out = torch.empty_like(x)
    unused = torch.zeros(1, dtype=torch.int8), torch.zeros(1)
    call("aclnnAddRmsNormDynamicQuant", x1, x2, gamma, None, None, 1e-6, y, unused[0], out, scale, unused[1])
    real = rms_norm(x.double(), gamma.double(), 1e-6)
    rounded(y, real / (real.abs().amax(-1, keepdim=True) / 127))


@pytest.mark.parametrize("dtype", HALVES)
def test_rms_norm_quant(dtype):
    x, gamma, beta = normal((5, 40), dtype, 60), normal((1, 40), dtype, 61), normal((40,), dtype, 62)
    scale, offset = torch.tensor([0.03], dtype=dtype), torch.tensor([-7], dtype=torch.int8)
    y = torch.empty(5, 40, dtype=torch.int8)
    call("aclnnRmsNormQuant", x, gamma, beta, scale, offset, 1e-6, y)
    real = (rms_norm(x.double(), gamma.double(), 1e-6) + beta.double()) / scale.double() - 7
    rounded(y, real, slack=2e-3)
    x[2, 3] = float("nan")
    call("aclnnRmsNormQuant", x, gamma, beta, scale, offset, 1e-6, y)
    assert not y[2].any() and y[1].any()  # the documents: NaN gives 0


def test_rms_norm_dynamic_quant():
    x, gamma, smooth = (normal(s, torch.bfloat16, 64 + k) for k, s in enumerate([(3, 5, 24), (24,), (24,)]))
    y, scale = torch.empty(3, 5, 24, dtype=torch.int8), torch.empty(3, 5)
    call("aclnnRmsNormDynamicQuant", x, gamma, smooth, None, 1e-6, 2, y, scale)
    real = rms_norm(x.double(), gamma.double(), 1e-6) * smooth.double()
    s = real.abs().amax(-1) / 127
    close(scale, s, roundings=4)
    rounded(y, real / s.unsqueeze(-1))


# ---- gated activation, then quantize ---------------------------------------------------------------------


@pytest.mark.parametrize("left", [True, False])
def test_swiglu_quant_dynamic_by_groups(left):
    x = normal((6, 34), torch.bfloat16, 70)
    smooth = normal((3, 17), torch.float32, 71).abs() + 0.5
    ends = torch.tensor([1, 4, 6], dtype=torch.int32)
    y, scale = torch.empty(6, 17, dtype=torch.int8), torch.empty(6)
    call("aclnnSwiGluQuant", x, smooth, None, ends, left, "dynamic", y, scale)
    a, b = x.double().chunk(2, -1)
    real = (silu(a) * b if left else silu(b) * a) * smooth.double()[[0, 1, 1, 1, 2, 2]]
    close(scale, 127 / real.abs().amax(-1), roundings=8)  # the inverse of what DynamicQuant writes
    rounded(y, real * (127 / real.abs().amax(-1, keepdim=True)), slack=2e-3)


def test_swiglu_quant_static_by_counts():
    x = normal((5, 16), torch.float32, 72)
    smooth, offsets = torch.tensor([20.0, 30.0]), torch.tensor([1.0, -2.0])
    counts = torch.tensor([2, 3], dtype=torch.int32)
    y, scale = torch.empty(5, 8, dtype=torch.int8), torch.full((5,), 7.0)
    call("aclnnSwiGluQuantV2", x, smooth, offsets, counts, True, "static", 1, 2, y, scale)
    a, b = x.double().chunk(2, -1)
    group = [0, 0, 1, 1, 1]
    rounded(y, silu(a) * b * smooth.double()[group, None] + offsets.double()[group, None])
    assert (scale == 7).all()


@pytest.mark.parametrize("bias_dtype", [None, torch.int32, torch.float32])
def test_dequant_swiglu_quant(bias_dtype):
    x = integers(-2000, 2000, (4, 22), 73, torch.int32)
    weight_scale = normal((22,), torch.float32, 74, 0.01)
    tokens = normal((4,), torch.float32, 75).abs() + 0.1
    bias = (
        None
        if bias_dtype is None
        else normal((22,), torch.float32, 76, 50.0 if bias_dtype == torch.int32 else 1.0).to(bias_dtype)
    )
    quant = normal((11,), torch.float32, 77).abs() + 0.5
    y, scale = torch.empty(4, 11, dtype=torch.int8), torch.empty(4)
    call(
        "aclnnDequantSwigluQuant", x, weight_scale, tokens, bias, quant, None, None, True, "dynamic", y, scale
    )
    real = x.double()
    if bias_dtype == torch.int32:
        real = real + bias.double()
    real = real * weight_scale.double() * tokens.double()[:, None]
    if bias_dtype == torch.float32:
        real = real + bias.double()
    a, b = real.chunk(2, -1)
    real = silu(a) * b * quant.double()
    close(scale, real.abs().amax(-1) / 127, roundings=20)
    rounded(y, real / (real.abs().amax(-1, keepdim=True) / 127), slack=5e-3)


def test_dequant_swiglu_quant_static():
    x = normal((4, 22), torch.float16, 81, 2.0)
    scale, offset = torch.tensor([0.04]), torch.tensor([-3.0])
    y, unused = torch.empty(4, 11, dtype=torch.int8), torch.full((4,), 7.0)
    call("aclnnDequantSwigluQuant", x, None, None, None, scale, offset, None, True, "static", y, unused)
    a, b = x.double().chunk(2, -1)
    rounded(y, silu(a) * b / scale.double() - 3)
    assert (unused == 7).all()


def test_dequant_swiglu_quant_by_groups():
    x = integers(-900, 900, (5, 12), 78, torch.int32)
    weight_scale, quant = (
        normal((2, 12), torch.float32, 79, 0.01),
        normal((2, 6), torch.float32, 80).abs() + 0.5,
    )
    y, scale = torch.empty(5, 6, dtype=torch.int8), torch.empty(5)
    counts = torch.tensor([3, 2])
    call(
        "aclnnDequantSwigluQuant",
        x,
        weight_scale,
        None,
        None,
        quant,
        None,
        counts,
        False,
        "dynamic",
        y,
        scale,
    )
    group = [0, 0, 0, 1, 1]
    a, b = (x.double() * weight_scale.double()[group]).chunk(2, -1)
    real = silu(b) * a * quant.double()[group]
    rounded(y, real / (real.abs().amax(-1, keepdim=True) / 127), slack=5e-3)


# ---- limits ----------------------------------------------------------------------------------------------


def test_limits_of_norms_that_quantize():
    x1, x2, gamma, x = residual(torch.float16, 90, (4, 48))
    y, out, scale = torch.empty(4, 48, dtype=torch.int8), torch.empty_like(x), torch.ones(48)

    def static(**changed):
        a = (
            dict(
                x1=x1,
                x2=x2,
                gamma=gamma,
                s1=scale,
                s2=None,
                z1=None,
                z2=None,
                axis=-1,
                eps=1e-6,
                div=True,
                y1=y,
                y2=y,
                x=out,
            )
            | changed
        )
        return "aclnnAddRmsNormQuant", *a.values()

    refused("divMode must be true", *static(div=False))
    refused("axis 0", *static(axis=0))
    refused("scales1 is Half with Half", *static(s1=scale.half()))
    refused("zero points of scales1 are BFloat16", *static(z1=scale.bfloat16()))
    refused("x2 is BFloat16", *static(x2=x2.bfloat16()))
    refused("gamma has shape", *static(gamma=gamma[:4]))
    refused("x1 is Float", *static(x1=x1.float()))
    refused("xOut is null", *static(x=None), code=161001)
    mask, rows = "aclnnAddRmsNormDynamicQuantV2", torch.empty(4)

    def dynamic(s1=None, s2=None, m=None):
        return mask, x1, x2, gamma, s1, s2, None, 1e-6, m, y, y, out, rows, rows

    refused("smoothScale2 needs smoothScale1", *dynamic(s2=gamma))
    refused("both values false", *dynamic(m=(False, False)))
    refused("outputMask is false", *dynamic(s1=gamma, m=(False, True)))
    refused("outputMask has 1", *dynamic(m=(True,)))
    refused("smoothScale is BFloat16", *dynamic(s1=gamma.bfloat16()))
    one, zero = torch.ones(1, dtype=torch.float16), torch.zeros(1, dtype=torch.int8)
    refused("offset is Float", "aclnnRmsNormQuant", x1, gamma, gamma, one, zero.float(), 1e-6, y)
    refused("scale has shape", "aclnnRmsNormQuant", x1, gamma, gamma, gamma, zero, 1e-6, y)
    refused("beta is null", "aclnnRmsNormQuant", x1, gamma, None, one, zero, 1e-6, y, code=161001)
    wide = torch.zeros(1, 8193, dtype=torch.float16)
    refused(
        "at most 8192", "aclnnRmsNormDynamicQuant", wide, wide[0], None, None, 1e-6, 2, wide.char(), rows[:1]
    )
    with on_soc("310P"):
        refused(
            "BFloat16", *static(x1=x1.bfloat16(), x2=x2.bfloat16(), gamma=gamma.bfloat16(), x=out.bfloat16())
        )
        refused(
            "at least 32 bytes",
            "aclnnAddRmsNormQuant",
            *(t[..., :8].contiguous() for t in (x1, x2, gamma)),
            scale[:8],
            None,
            None,
            None,
            -1,
            1e-6,
            True,
            y[:, :8],
            y,
            out[:, :8],
        )
        refused("310P", *dynamic())


def test_limits_of_activations_that_quantize():
    x, smooth = normal((4, 12), torch.float16, 1), torch.ones(1, 6)
    y, scale = torch.empty(4, 6, dtype=torch.int8), torch.empty(4)
    swiglu = "aclnnSwiGluQuant"
    refused("smoothScales is null", swiglu, x, None, None, None, True, "dynamic", y, scale, code=161001)
    refused("must be even", swiglu, x[:, :11].contiguous(), smooth, None, None, True, "dynamic", y, scale)
    refused("quantMode 'other'", swiglu, x, smooth, None, None, True, "other", y, scale)
    refused("needs offsets", swiglu, x, smooth, None, None, True, "static", y, scale)
    refused(
        "x is not contiguous", swiglu, x.t().contiguous().t(), smooth, None, None, True, "dynamic", y, scale
    )
    refused("groupIndex is Long", swiglu, x, smooth, None, torch.tensor([4]), True, "dynamic", y, scale)
    wide = torch.zeros(1, 8194, dtype=torch.float16)
    refused("at most 8192", swiglu, wide, smooth, None, None, True, "dynamic", y, scale)
    dequant, ints, n = "aclnnDequantSwigluQuant", x.int(), torch.ones(12)
    refused("only then", dequant, ints, None, None, None, None, None, None, True, "dynamic", y, scale)
    refused("only then", dequant, x, n, None, None, None, None, None, True, "dynamic", y, scale)
    refused(
        "need int32 x", dequant, x, None, torch.ones(4), None, None, None, None, True, "dynamic", y, scale
    )
    refused("quantMode 'other'", dequant, ints, n, None, None, None, None, None, True, "other", y, scale)
    refused("quantMode ''", dequant, ints, n, None, None, None, None, None, True, None, y, scale)
    refused(
        "static quantScale has 6", dequant, ints, n, None, None, n[:6], None, None, True, "static", y, scale
    )
    refused("needs dynamic", dequant, ints, n, None, None, None, None, ints[0, :1], True, "static", y, scale)
    refused(
        "weightScale has shape", dequant, ints, n[:5], None, None, None, None, None, True, "dynamic", y, scale
    )
    refused("groupIndex is Float", dequant, ints, n, None, None, None, None, n[:1], True, "dynamic", y, scale)
    with on_soc("910C"):
        refused(
            "not supported on Ascend910_93",
            dequant,
            ints,
            n,
            None,
            None,
            None,
            None,
            None,
            True,
            "dynamic",
            y,
            scale,
        )
