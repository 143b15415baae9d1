"""Quantizing operators of the simulator against float64, and what they refuse."""

from __future__ import annotations

import pytest
import torch

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
    call("aclnnDynamicQuantV2", x, None, None, 3, y, scale, None)
    real = x.double() / (x.double().abs().amax(-1, keepdim=True) / 7)
    rounded(unpack(y), real, bits=4)


def test_dynamic_quant_with_an_offset():
    x = normal((6, 33), torch.float16, 4) + 1
    y, scale, offset = torch.empty(6, 33, dtype=torch.int8), torch.empty(6), torch.empty(6)
    call("aclnnDynamicQuantV2", x, None, None, 2, y, scale, offset)
    real = x.double()
    s = (real.amax(-1) - real.amin(-1)) / 255
    close(scale, s)
    close(offset, 127 - real.amax(-1) / s, roundings=4)
    rounded(y, real / s[:, None] + (127 - real.amax(-1) / s)[:, None])


def test_dynamic_quant_smooths_each_expert_by_its_own_factors():
    x, factors = normal((7, 10), torch.bfloat16, 5), normal((3, 10), torch.bfloat16, 6).abs() + 0.5
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)  # the second expert has no row
    y, scale = torch.empty(7, 10, dtype=torch.int8), torch.empty(7)
    call("aclnnDynamicQuantV2", x, factors, ends, 2, y, scale, None)
    real = x.double() * factors.double()[[0, 0, 2, 2, 2, 2, 2]]
    top = real.abs().amax(-1)
    close(scale, top / 127)
    rounded(y, real / (top / 127)[:, None])


@pytest.mark.parametrize("mode", ["round", "ceil", "floor", "trunc"])
@pytest.mark.parametrize("axis", [-1, 0])
def test_ascend_quant_rounds_as_asked(mode, axis):
    x, n = normal((9, 13), torch.float32, 7, 3.0), (9, 13)[axis]
    scale, offset = normal((n,), torch.float32, 8).abs() + 4, integers(-9, 9, (n,), 9).float()
    y = torch.empty(9, 13, dtype=torch.int8)
    call("aclnnAscendQuantV3", x, scale, offset, False, mode, 2, axis, y)
    shape = (1, 13) if axis == -1 else (9, 1)
    real = x.double() * scale.double().view(shape) + offset.double().view(shape)
    real = {"round": torch.round, "ceil": torch.ceil, "floor": torch.floor, "trunc": torch.trunc}[mode](real)
    wrong = y.double() != real.clamp(-128, 127)
    assert wrong.sum() <= 1  # a value that float32 moved over a step
    assert y.unique().numel() > 20


def test_ascend_quant_rounds_half_to_even():
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 200.0]])
    y = torch.empty(1, 8, dtype=torch.int8)
    call("aclnnAscendQuantV3", x, torch.ones(1), None, False, "round", 2, -1, y)
    assert y.tolist() == [[0, 2, 2, 0, -2, -2, 126, 127]]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("sqrt_mode", [False, True])
def test_ascend_anti_quant(dtype, sqrt_mode):
    x = integers(-128, 127, (5, 19), 10)
    scale, offset = normal((19,), torch.float32, 11), integers(-5, 5, (19,), 12).float()
    y = torch.empty(5, 19, dtype=dtype)
    call("aclnnAscendAntiQuant", x, scale, offset, 1 if dtype == torch.float16 else 27, sqrt_mode, y)
    s = scale.double() ** (2 if sqrt_mode else 1)
    close(y, (x.double() + offset.double()) * s)


def test_ascend_anti_quant_reads_int4():
    values = integers(-8, 7, (3, 16), 13)
    y = torch.empty(3, 16, dtype=torch.float16)
    call("aclnnAscendAntiQuant", pack(values), torch.full((16,), 0.25), None, 1, False, y)
    assert torch.equal(y, (values.float() * 0.25).half())


def test_scales_of_the_cube_unit_hold_19_bits_and_an_offset_of_9():
    scale = torch.tensor([1.0, 0.1, -3.7])
    offset = torch.tensor([0.0, -256.4, 255.5])
    out = torch.empty(3, dtype=torch.int64)
    call("aclnnTransQuantParamV2", scale, None, out)
    bits = scale.view(torch.int32).to(torch.int64) & 0xFFFFE000
    assert out.tolist() == (bits | (1 << 46)).tolist()
    call("aclnnTransQuantParamV2", scale, offset, out)
    assert [(v >> 37) & 0x1FF for v in out.tolist()] == [0, 256, 255]  # -256 in nine bits; saturated
    assert all(v >> 46 & 1 for v in out.tolist())


def test_weight_packing():
    values = integers(-8, 7, (6, 16), 14, torch.int32)
    packed = torch.empty(6, 2, dtype=torch.int32)
    call("aclnnConvertWeightToINT4Pack", values, packed)
    assert torch.equal(packed, pack(values)) and torch.equal(unpack(packed), values.to(torch.int8))
    blocks = Nz(torch.zeros(6, 2, dtype=torch.int32))
    call("aclnnConvertWeightToINT4Pack", values, blocks)
    assert blocks.storage.shape == (1, 1, 16, 8)
    assert torch.equal(blocks.storage, Nz(packed).storage)


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
    refused("yOut is null", "aclnnDynamicQuant", x, None, None, scale, code=161001)
    refused("divisible by 8", "aclnnDynamicQuantV2", x[:, :36], None, None, 3, y[:, :4].int(), scale, None)
    refused("dstType 4", "aclnnDynamicQuantV2", x, None, None, 4, y, scale, None)
    refused("but dstType 3", "aclnnDynamicQuantV2", x, None, None, 3, y, scale, None)
    groups = torch.tensor([1, 4], dtype=torch.int32)
    refused("groupIndex needs smoothScales", "aclnnDynamicQuantV2", x, None, groups, 2, y, scale, None)
    refused("groupIndex is Long", "aclnnDynamicQuantV2", x, x[:2], groups.long(), 2, y, scale, None)
    refused("Ascend 950", "aclnnDynamicQuantV3", x, None, None, 2, True, "pertoken", y, scale, None)
    with on_soc("310P"):
        refused("multiple of 32", "aclnnDynamicQuant", x, None, y, scale)
        refused("x .310P. is BFloat16", "aclnnDynamicQuant", x.bfloat16(), None, y, scale)
        call("aclnnDynamicQuant", x[:, :32].contiguous(), None, y[:, :32].contiguous(), scale)
        refused("symmetrically", "aclnnDynamicQuantV2", x[:, :32], None, None, 2, y[:, :32], scale, scale)


def test_limits_of_the_plain_quantizations():
    x, y = normal((4, 6), torch.float32, 1), torch.empty(4, 6, dtype=torch.int8)
    one = torch.ones(1)
    quant = "aclnnAscendQuantV3"
    refused("roundMode 'rint'", quant, x, one, None, False, "rint", 2, -1, y)
    refused("dstType 4", quant, x, one, None, False, "round", 4, -1, y)
    refused("axis -3", quant, x, one, None, False, "round", 2, -3, y)
    refused("scale has 5 values", quant, x, torch.ones(5), None, False, "round", 2, -1, y)
    refused("x is Double", quant, x.double(), one, None, False, "round", 2, -1, y)
    refused("divisible by 8", quant, x, one, None, False, "round", 3, -1, y.int())
    anti, half = "aclnnAscendAntiQuant", torch.empty(4, 6, dtype=torch.float16)
    refused("dstType 0", anti, y, one, None, 0, False, half)
    refused("scale has 2 axes", anti, y, one[None], None, 1, False, half)
    refused("scale has 3 values", anti, y, torch.ones(3), None, 1, False, half)
    refused("y is Half but dstType 27", anti, y, one, None, 27, False, half)
    refused("x is Byte", anti, y.to(torch.uint8), one, None, 1, False, half)
    refused("scale is Half", "aclnnTransQuantParamV2", one.half(), None, torch.empty(1, dtype=torch.int64))
    refused("out has shape", "aclnnTransQuantParamV2", one, None, torch.empty(2, dtype=torch.int64))
    refused(
        "out has 1 values", "aclnnTransQuantParamV2", one, torch.ones(2), torch.empty(1, dtype=torch.int64)
    )
    pack_ = "aclnnConvertWeightToINT4Pack"
    refused("weight is Char", pack_, y, torch.empty(4, 1, dtype=torch.int32))
    refused("divisible by 8", pack_, y.int(), torch.empty(4, 1, dtype=torch.int32))
    refused(
        "contiguous", pack_, torch.zeros(8, 8, dtype=torch.int32).t(), torch.empty(8, 1, dtype=torch.int32)
    )
    with on_soc("310P"):
        refused("last one only", quant, x, torch.ones(4), None, False, "round", 2, 0, y)
        refused("x is BFloat16", quant, x.bfloat16(), one, None, False, "round", 2, -1, y)
        refused("dstType 27", anti, y, one, None, 27, False, half.bfloat16())
        refused("310P", pack_, torch.zeros(8, 8, dtype=torch.int32), torch.empty(8, 1, dtype=torch.int32))
