"""Quantizing operators of the simulator against float64, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from .calls import NZ, Stored
from .operators import Nz, call, close, integers, normal, on_soc, pack, refused, rounded, unpack

HALVES = (torch.float16, torch.bfloat16)


# ---- quantize, dequantize --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 17), (7, 130)])
@pytest.mark.parametrize("smooth", [False, True])
def test_dynamic_quant(dtype, shape, smooth):
    x = normal(shape, dtype, 1)
    factors = normal(shape[-1:], dtype, 2).abs() + 0.5 if smooth else None
    y, scale = torch.empty(shape, dtype=torch.int8), torch.empty(shape[:-1])
    call("aclnnDynamicQuant", x, factors, y, scale)
    real = x.double() * (factors.double() if smooth else 1)
    top = real.abs().amax(-1)
    close(scale, top / 127)
    assert (y.double() - real / (top / 127).unsqueeze(-1)).abs().max() <= 0.501


def test_dynamic_quant_of_a_row_of_zeros_is_zero():
    x = normal((3, 8), torch.float16, 1)
    x[1] = 0
    y, scale = torch.full((3, 8), 9, dtype=torch.int8), torch.empty(3)
    call("aclnnDynamicQuant", x, None, y, scale)
    assert not y[1].any() and scale[1] == 0


def test_dynamic_quant_to_int4_packs_eight_in_an_int32():
    x = normal((5, 24), torch.bfloat16, 3)
    y, scale = torch.empty(5, 3, dtype=torch.int32), torch.empty(5)
    call("aclnnDynamicQuant", x, None, y, scale)
    real = x.double() / (x.double().abs().amax(-1, keepdim=True) / 7)
    rounded(unpack(y), real, bits=4)


def test_dynamic_quant_rounds_half_to_even():
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 127.0]], dtype=torch.float16)  # scale 1
    y, scale = torch.empty(1, 8, dtype=torch.int8), torch.empty(1)
    call("aclnnDynamicQuant", x, None, y, scale)
    assert y.tolist() == [[0, 2, 2, 0, -2, -2, 126, 127]]


def test_weight_packing():
    values = integers(-8, 7, (6, 16), 14, torch.int32)
    packed = torch.empty(6, 2, dtype=torch.int32)
    call("aclnnConvertWeightToINT4Pack", values, packed)
    assert torch.equal(packed, pack(values)) and torch.equal(unpack(packed), values.to(torch.int8))
    blocks = Nz(torch.zeros(6, 2, dtype=torch.int32))
    call("aclnnConvertWeightToINT4Pack", values, blocks)
    assert blocks.storage.shape == (1, 1, 16, 8)
    assert torch.equal(blocks.storage, Nz(packed).storage)


# ---- norm, then quantize ---------------------------------------------------------------------------------


def residual(dtype, seed, shape=(2, 3, 72)):
    """Two summands, a weight, and the sum rounded to ``dtype``."""
    x1, x2 = normal(shape, dtype, seed), normal(shape, dtype, seed + 1)
    gamma = normal(shape[-1:], dtype, seed + 2)
    return x1, x2, gamma, (x1.double() + x2.double()).to(dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_add_rms_norm_dynamic_quant(dtype, count):
    """Without smoothing scales there is one output, and with two of them there are two."""
    x1, x2, gamma, x = residual(dtype, 40)
    smooth = [normal((72,), dtype, 44 + k).abs() + 0.5 if k < count else None for k in range(2)]
    y = [torch.full(x.shape, 7, dtype=torch.int8) for _ in range(2)]
    scale, out = [torch.full(x.shape[:-1], 7.0) for _ in range(2)], torch.empty_like(x)
    call("aclnnAddRmsNormDynamicQuant", x1, x2, gamma, *smooth, 1e-5, *y, out, *scale)
    assert torch.equal(out, x)
    total = x.double()
    normed = total / torch.sqrt((total * total).mean(-1, keepdim=True) + 1e-5) * gamma.double()
    for k in range(2):
        if k >= max(count, 1):
            assert (y[k] == 7).all() and (scale[k] == 7).all()
            continue
        real = normed * (1 if smooth[k] is None else smooth[k].double())
        s = real.abs().amax(-1) / 127
        close(scale[k], s, roundings=4)
        rounded(y[k], real / s.unsqueeze(-1))


# ---- limits ----------------------------------------------------------------------------------------------


def test_limits_of_dynamic_quant():
    x, y, scale = normal((4, 40), torch.float16, 1), torch.empty(4, 40, dtype=torch.int8), torch.empty(4)
    refused("x is Float", "aclnnDynamicQuant", x.float(), None, y, scale)
    refused("x has 1 axes", "aclnnDynamicQuant", x[0], None, y[0], scale[0])
    refused("smoothScales is BFloat16", "aclnnDynamicQuant", x, x[0].bfloat16(), y, scale)
    refused("smoothScales has shape", "aclnnDynamicQuant", x, x[0, :4], y, scale)
    refused("scaleOut is Double", "aclnnDynamicQuant", x, None, y, scale.double())
    refused("scaleOut has shape", "aclnnDynamicQuant", x, None, y, scale[:2])
    refused("yOut is Short", "aclnnDynamicQuant", x, None, y.short(), scale)
    refused("divisible by 8", "aclnnDynamicQuant", x[:, :36], None, y[:, :4].int(), scale)
    refused("yOut is null", "aclnnDynamicQuant", x, None, None, scale, code=161001)
    with on_soc("310P"):
        refused("multiple of 32", "aclnnDynamicQuant", x, None, y, scale)
        refused("x .310P. is BFloat16", "aclnnDynamicQuant", x.bfloat16(), None, y, scale)
        call("aclnnDynamicQuant", x[:, :32].contiguous(), None, y[:, :32].contiguous(), scale)


def test_limits_of_packing():
    pack_, weight = "aclnnConvertWeightToINT4Pack", torch.zeros(4, 6, dtype=torch.int32)
    packed = torch.empty(4, 1, dtype=torch.int32)
    refused("weight is Char", pack_, weight.char(), packed)
    refused("divisible by 8", pack_, weight, packed)
    square, column = torch.zeros(8, 8, dtype=torch.int32), torch.empty(8, 1, dtype=torch.int32)
    refused("contiguous", pack_, square.t(), column)
    flat = Stored(column, NZ, [8, 1])
    refused("in FRACTAL_NZ has 2 axes in memory", pack_, square, flat)
    with on_soc("310P"):
        refused("310P", pack_, square, column)


def test_limits_of_add_rms_norm_dynamic_quant():
    x1, x2, gamma, x = residual(torch.float16, 90, (4, 48))
    y, rows = torch.empty(4, 48, dtype=torch.int8), torch.empty(4)

    def norm(**changed):
        outputs = {"y1": y, "y2": y, "x": x, "scale1": rows, "scale2": rows}
        arguments = {"x1": x1, "x2": x2, "gamma": gamma, "smooth1": None, "smooth2": None, "eps": 1e-6}
        return "aclnnAddRmsNormDynamicQuant", *(arguments | outputs | changed).values()

    refused("x1 is Float", *norm(x1=x1.float()))
    refused("x2 is BFloat16", *norm(x2=x2.bfloat16()))
    refused("gamma has shape", *norm(gamma=gamma[:4]))
    refused("xOut is null", *norm(x=None), code=161001)
    refused("smoothScale2 needs smoothScale1", *norm(smooth2=gamma))
    refused("smoothScale is BFloat16", *norm(smooth1=gamma.bfloat16()))
    refused("y1Out is Int", *norm(y1=y.int()))
    with on_soc("310P"):
        refused("310P", *norm())
