"""Quantized matrix products of the simulator against float64, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from .operators import (
    Nz,
    call,
    close,
    hardware_scale,
    in_release,
    integers,
    normal,
    on_soc,
    pack,
    refused,
    rounded,
)

HALVES = (torch.float16, torch.bfloat16)


# ---- 16-bit activations, 8- or 4-bit weights -------------------------------------------------------------


def weight_only(dtype, k, n, groups, seed, bits=8):
    high = 2 ** (bits - 1) - 1
    weight = integers(-high - 1, high, (k, n), seed)
    shape = (n,) if groups is None else (groups, n)
    scale = normal(shape, dtype, seed + 1, 0.02)
    offset = integers(-4, 4, shape, seed + 2).to(dtype)
    return weight, scale, offset


def dequantized(weight, scale, offset, dtype, group=0):
    rows = (lambda t: t.repeat_interleave(group, 0)[: weight.shape[0]]) if group else (lambda t: t)
    w = (weight.double() + rows(offset.double())) * rows(scale.double())
    return w.float().to(dtype).double()  # the cube unit takes 16-bit operands


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(1, 33, 5), (7, 160, 70)])
def test_weight_quant_per_channel(dtype, shape):
    m, k, n = shape
    x, bias = normal((m, k), dtype, 1), normal((n,), torch.float32 if dtype == torch.bfloat16 else dtype, 2)
    weight, scale, offset = weight_only(dtype, k, n, None, 3)
    y = torch.empty(m, n, dtype=dtype)
    stored = weight.t().contiguous().t()  # as (n, k), seen transposed
    call("aclnnWeightQuantBatchMatmulV2", x, stored, scale, offset, None, None, bias, 0, y)
    close(y, x.double() @ dequantized(weight, scale, offset, dtype) + bias.double())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("bits", [8, 4])
def test_weight_quant_per_group(dtype, group, bits):
    m, k, n = 5, 150, 24  # the last group is short
    x = normal((m, k), dtype, 11)
    weight, scale, offset = weight_only(dtype, k, n, -(-k // group), 12, bits)
    y = torch.empty(m, n, dtype=dtype)
    given = pack(weight) if bits == 4 else weight
    call("aclnnWeightQuantBatchMatmulV3", x, given, scale, offset, None, None, None, group, 0, y)
    close(y, x.double() @ dequantized(weight, scale, offset, dtype, group))


def test_weight_quant_int4_per_channel_transposed():
    x = normal((3, 40), torch.float16, 21)
    weight, scale, _ = weight_only(torch.float16, 40, 9, None, 22, 4)
    y = torch.empty(3, 9, dtype=torch.float16)
    given = pack(weight.t().contiguous()).t()
    call("aclnnWeightQuantBatchMatmulV2", x, given, scale, None, None, None, None, 0, y)
    close(y, x.double() @ dequantized(weight, scale, torch.zeros(9), torch.float16))


@pytest.mark.parametrize("bits", [8, 4])
def test_weight_quant_reads_fractal_nz(bits):
    x = normal((3, 128), torch.bfloat16, 31)
    if bits == 8:
        weight, scale, offset = weight_only(torch.bfloat16, 128, 70, None, 32)
        nz, group = Nz(weight), 0
    else:
        weight, scale, offset = weight_only(torch.bfloat16, 128, 192, 2, 32, 4)
        nz, group = Nz(pack(weight)), 64
    y = torch.empty(3, weight.shape[1], dtype=torch.bfloat16)
    call("aclnnWeightQuantBatchMatmulV2", x, nz, scale, offset, None, None, None, group, y)
    close(y, x.double() @ dequantized(weight, scale, offset, torch.bfloat16, group))


def test_weight_quant_with_a_scale_of_the_cube_unit():
    x, weight = normal((4, 64), torch.float16, 41), integers(-128, 127, (128, 64), 42)
    bits, scale = hardware_scale(normal((128,), torch.float32, 43, 0.02).abs())
    offset = integers(-9, 9, (128,), 44, torch.int32)
    y = torch.empty(4, 128, dtype=torch.float16)
    call("aclnnWeightQuantBatchMatmulV2", x, weight.t(), bits, offset, None, None, None, 0, y)
    close(y, (x.double() @ (weight.double() + offset.double()[:, None]).t()) * scale, inside=1e-6)


def test_weight_quant_can_quantize_its_output():
    x = normal((4, 48), torch.float16, 51)
    weight, scale, offset = weight_only(torch.float16, 48, 10, None, 52)
    quant, value = hardware_scale(torch.full((10,), 3.0), torch.full((10,), 5.0))
    y = torch.empty(4, 10, dtype=torch.int8)
    call("aclnnWeightQuantBatchMatmulV2", x, weight, scale, offset, quant, None, None, 0, y)
    rounded(y, (x.double() @ dequantized(weight, scale, offset, torch.float16)) * value + 5, slack=2e-3)


def test_weight_quant_on_310p_takes_an_nz_weight_as_n_by_k():
    x, weight = normal((3, 64), torch.float16, 61), integers(-128, 127, (20, 64), 62)
    scale = normal((20, 1), torch.float16, 63, 0.02)
    y = torch.empty(3, 20, dtype=torch.float16)
    with on_soc("310P"):
        call("aclnnWeightQuantBatchMatmulV2", x, Nz(weight), scale, None, None, None, None, 0, y)
    close(y, x.double() @ dequantized(weight.t(), scale.t(), torch.zeros(1, 20), torch.float16))


# ---- both operands quantized -----------------------------------------------------------------------------


def operands(m, k, n, seed):
    return integers(-128, 127, (m, k), seed), integers(-128, 127, (k, n), seed + 1)


@pytest.mark.parametrize("shape", [(1, 17, 3), (6, 130, 33)])
@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("bias_dtype", [None, torch.int32, torch.float32, torch.bfloat16])
def test_quant_matmul_to_bfloat16(shape, tokens, bias_dtype):
    m, k, n = shape
    x1, x2 = operands(m, k, n, 1)
    scale = normal((n,), torch.float32, 3, 0.01)
    token_scale = normal((m,), torch.float32, 4).abs() if tokens else None
    bias = None if bias_dtype is None else normal((n,), torch.float32, 5, 900.0).to(bias_dtype)
    out = torch.empty(m, n, dtype=torch.bfloat16)
    call("aclnnQuantMatmulV4", x1, x2, scale, None, token_scale, bias, False, False, out)
    real = x1.double() @ x2.double()
    if bias_dtype == torch.int32:
        real = real + bias.double()
    real = real * scale.double() * (token_scale.double()[:, None] if tokens else 1)
    if bias_dtype not in (None, torch.int32):
        real = real + bias.double()
    close(out, real)


def test_quant_matmul_sums_exactly_in_int32():
    x1, x2 = operands(3, 4096, 2, 6)
    out = torch.empty(3, 2, dtype=torch.int32)
    bias = torch.tensor([1, -2], dtype=torch.int32)
    call("aclnnQuantMatmulV4", x1, x2, torch.ones(2), None, None, bias, False, False, out)
    assert torch.equal(out.long(), x1.long() @ x2.long() + bias)


@pytest.mark.parametrize("transposed", ["flags", "views"])
def test_quant_matmul_to_float16_with_a_scale_of_the_cube_unit(transposed):
    x1, x2 = operands(5, 40, 12, 7)
    scale = normal((12,), torch.float32, 9, 0.002)
    bits, value = hardware_scale(scale)
    out = torch.empty(5, 12, dtype=torch.float16)
    a, b = x1.t().contiguous(), x2.t().contiguous()
    if transposed == "flags":
        call("aclnnQuantMatmulV4", a, b, bits, None, None, None, True, True, out)
    else:
        call("aclnnQuantMatmulV4", a.t(), b.t(), bits, None, None, None, False, False, out)
    close(out, x1.double() @ x2.double() * value)


def test_quant_matmul_to_int8_reads_its_offset_from_the_scale():
    x1, x2 = operands(5, 40, 12, 10)
    offset = torch.full((12,), -3.0)
    bits, value = hardware_scale(torch.full((12,), 0.0007), offset)
    out = torch.empty(5, 12, dtype=torch.int8)
    call("aclnnQuantMatmulV4", x1, x2, bits, offset, None, None, False, False, out)
    rounded(out, x1.double() @ x2.double() * value - 3)


def test_quant_matmul_of_int4():
    x1, x2 = integers(-8, 7, (3, 16), 11), integers(-8, 7, (16, 24), 12)
    scale, tokens = normal((24,), torch.float32, 13), normal((3,), torch.float32, 14).abs()
    out = torch.empty(3, 24, dtype=torch.bfloat16)
    call("aclnnQuantMatmulV4", pack(x1), pack(x2), scale, None, tokens, None, False, False, out)
    real = x1.double() @ x2.double() * scale.double() * tokens.double()[:, None]
    close(out, real)
    call(
        "aclnnQuantMatmulV4", pack(x1), pack(x2.t().contiguous()), scale, None, tokens, None, False, True, out
    )
    close(out, real)


def test_quant_matmul_broadcasts_a_batch():
    x1, x2 = integers(-128, 127, (2, 3, 20), 15), integers(-128, 127, (1, 20, 6), 16)
    out = torch.empty(2, 3, 6, dtype=torch.int32)
    call("aclnnQuantMatmulV4", x1, x2, torch.ones(1), None, None, None, False, False, out)
    assert torch.equal(out.long(), x1.long() @ x2.long())


def test_quant_matmul_by_blocks():
    m, k, n = 3, 200, 150
    x1, x2 = operands(m, k, n, 21)
    s1, s2 = normal((m, 2), torch.float32, 23).abs(), normal((2, 2), torch.float32, 24, 0.01).abs()
    bias = normal((n,), torch.float32, 25, 100.0)
    out = torch.empty(m, n, dtype=torch.bfloat16)
    group = 128 | 128 << 16 | 1 << 32
    given = x2.t().contiguous()  # (n, k), its scale (n blocks, k blocks)
    scales = s1, s2.t().contiguous(), None, None, None, None
    call("aclnnQuantMatmulV5", x1, given, *scales, bias, False, True, group, out)
    column = lambda i, size: torch.arange(size) // 128  # noqa: E731
    a = x1.double() * s1.double()[:, column(1, k)]
    b = x2.double() * s2.double()[column(0, k)][:, column(1, n)]
    close(out, a @ b + bias.double())


def test_quant_matmul_of_8_by_4_bits_makes_up_for_the_shift():
    m, k, n = 3, 512, 16
    x1, x2 = integers(-128, 127, (m, k), 26), integers(-8, 7, (k, n), 27)
    bits, value = hardware_scale(normal((2, n), torch.float32, 28, 0.01).abs())
    value = value.repeat_interleave(256, 0)
    tokens = normal((m, 1), torch.float32, 29).abs()
    shift = (8 * x2.double() * value).sum(0).float()
    out = torch.empty(m, n, dtype=torch.bfloat16)
    scales = tokens, bits, None, None, None, shift
    call("aclnnQuantMatmulV5", x1, pack(x2), *scales, None, False, False, 256, out)
    close(out, (x1.double() @ (x2.double() * value)) * tokens.double(), inside=1e-5)


# ---- limits ----------------------------------------------------------------------------------------------

V2, V3 = "aclnnWeightQuantBatchMatmulV2", "aclnnWeightQuantBatchMatmulV3"


def weight_quant(**changed):
    half = torch.float16
    arguments = {
        "x": torch.zeros(4, 128, dtype=half),
        "weight": torch.zeros(128, 64, dtype=torch.int8),
        "scale": torch.ones(64, dtype=half),
        "offset": None,
        "quant_scale": None,
        "quant_offset": None,
        "bias": None,
        "group": 0,
        "y": torch.empty(4, 64, dtype=half),
    }
    return V2, *(arguments | changed).values()


def test_limits_of_weight_quant():
    half, bf16 = torch.float16, torch.bfloat16
    refused("x is Float", *weight_quant(x=torch.zeros(4, 128)))
    refused("weight is Short", *weight_quant(weight=torch.zeros(128, 64, dtype=torch.int16)))
    refused("x has k = 96", *weight_quant(x=torch.zeros(4, 96, dtype=half)))
    refused("antiquantScale is BFloat16", *weight_quant(scale=torch.ones(64, dtype=bf16)))
    refused("antiquantScale has shape", *weight_quant(scale=torch.ones(32, dtype=half)))
    refused("antiquantScale has shape", *weight_quant(group=32))
    refused("antiquantGroupSize 48", *weight_quant(group=48))
    refused("antiquantGroupSize 128", *weight_quant(group=128))
    refused("antiquantOffset has shape", *weight_quant(offset=torch.ones(1, dtype=half)))
    refused("bias is Float with Half", *weight_quant(bias=torch.ones(64)))
    refused("bias has shape .3.", *weight_quant(bias=torch.ones(3, dtype=half)))
    refused("y is BFloat16", *weight_quant(y=torch.empty(4, 64, dtype=bf16)))
    refused("y has shape", *weight_quant(y=torch.empty(3, 64, dtype=half)))
    tall = torch.ones(64, 1, dtype=torch.int64)
    refused("quantScale has shape", *weight_quant(quant_scale=tall, y=torch.empty(4, 64, dtype=torch.int8)))
    gaps = torch.zeros(4, 256, dtype=half)
    refused("x is neither contiguous nor transposed", *weight_quant(x=gaps[:, :128]))
    refused(
        "weight is neither contiguous", *weight_quant(weight=torch.zeros(128, 128, dtype=torch.int8)[:, :64])
    )
    refused("antiquantScale is not contiguous", *weight_quant(scale=torch.ones(128, dtype=half)[::2]))
    refused("bias is not contiguous", *weight_quant(bias=torch.ones(128, dtype=half)[::2]))
    refused("y is not contiguous", *weight_quant(y=gaps[:, :64]))
    refused("quantOffset needs quantScale", *weight_quant(quant_offset=torch.ones(64)))
    refused("y with quantScale is Half", *weight_quant(quant_scale=torch.ones(64, dtype=torch.int64)))
    refused("weight is null", *weight_quant(weight=None), code=161001)
    wide = torch.zeros(4, 65536, dtype=half)
    refused("65535", *weight_quant(x=wide, weight=torch.zeros(65536, 64, dtype=torch.int8)))
    bits, flat = torch.ones(64, dtype=torch.int64), torch.zeros(64, 128, dtype=torch.int8).t()
    refused("weight ND transposed", *weight_quant(scale=bits))
    tall = {"x": torch.zeros(97, 128, dtype=half), "y": torch.empty(97, 64, dtype=half)}
    refused("m in .1, 96.", *weight_quant(scale=bits, weight=flat, **tall))
    refused("Offset with a 64-bit", *weight_quant(scale=bits, weight=flat, offset=torch.ones(64, dtype=half)))
    narrow = {"weight": flat[:, :40], "scale": bits[:40], "y": torch.empty(4, 40, dtype=half)}
    refused("divisible by 64", *weight_quant(**narrow))
    packed = torch.zeros(128, 8, dtype=torch.int32)
    refused("must be transposed", *weight_quant(weight=Nz(packed)))
    refused("not per tensor", *weight_quant(weight=Nz(packed), scale=torch.ones(1, dtype=half)))
    integers = {"quant_scale": torch.ones(64, dtype=torch.int64), "y": torch.empty(4, 64, dtype=torch.int8)}
    bytes_in_nz = weight_quant(weight=Nz(torch.zeros(128, 64, dtype=torch.int8)), **integers)
    refused("an NZ weight excludes int8 y", *bytes_in_nz)
    with in_release("9.2.0"):
        refused("an NZ weight excludes int8 y", *weight_quant(weight=Nz(packed), **integers))
        call(*bytes_in_nz)
    refused("64 or 128", *weight_quant(weight=Nz(packed), group=32, scale=torch.ones(4, 64, dtype=half)))
    refused(
        "per tensor or per channel",
        *weight_quant(
            weight=Nz(torch.zeros(128, 64, dtype=torch.int8)), group=32, scale=torch.ones(4, 64, dtype=half)
        ),
    )
    small = {
        "weight": Nz(packed[:, :5].contiguous()),
        "group": 64,
        "scale": torch.ones(2, 40, dtype=half),
        "y": torch.empty(4, 40, dtype=half),
    }
    refused("n divisible by 64", *weight_quant(**small))
    _, *rest = weight_quant()
    refused("innerPrecise 2", V3, *rest[:-1], 2, rest[-1])
    with on_soc("310P"):
        refused("x .310P. is BFloat16", *weight_quant(x=torch.zeros(4, 128, dtype=bf16)))
        refused("weight .310P. is Int", *weight_quant(weight=packed))
        tall = torch.zeros(1, dtype=half).expand(4_000_001, 128)
        refused("m . k of at most 512000000, m is 4000001", *weight_quant(x=tall, group=64))
        call(V3, *rest[:-1], 0, rest[-1])
    with on_soc("950"):
        turned = torch.zeros(64, 16, dtype=torch.int32).t()  # stored as (n, k)
        scale = torch.ones(2, 64, dtype=half)
        lies = "antiquantScale must be transposed where weight is"
        refused(lies, *weight_quant(weight=turned, group=64, scale=scale))
        refused(lies, *weight_quant(weight=packed, group=64, scale=scale.t().contiguous().t()))
        refused("weight in ND", *weight_quant(weight=Nz(torch.zeros(128, 64, dtype=torch.int8))))


def quant(**changed):
    arguments = {
        "x1": torch.zeros(4, 64, dtype=torch.int8),
        "x2": torch.zeros(64, 32, dtype=torch.int8),
        "scale": torch.ones(32),
        "offset": None,
        "tokens": None,
        "bias": None,
        "t1": False,
        "t2": False,
        "out": torch.empty(4, 32, dtype=torch.bfloat16),
    }
    return "aclnnQuantMatmulV4", *(arguments | changed).values()


def test_limits_of_quant_matmul():
    half, bits = torch.empty(4, 32, dtype=torch.float16), torch.ones(32, dtype=torch.int64)
    int8 = torch.empty(4, 32, dtype=torch.int8)
    refused("x1 is Half", *quant(x1=half))
    refused("x2 Int", *quant(x2=torch.zeros(64, 4, dtype=torch.int32)))
    refused("k of x1 is 63", *quant(x1=torch.zeros(4, 63, dtype=torch.int8)))
    refused("Half out needs a 64-bit scale", *quant(out=half))
    refused(
        "Half out needs a 64-bit scale",
        *quant(out=half, tokens=torch.ones(4), scale=torch.ones(32).bfloat16()),
    )
    refused("excludes the scale of x1", *quant(out=half, scale=bits, tokens=torch.ones(4)))
    refused("an offset needs a 64-bit scale", *quant(offset=torch.ones(32)))
    refused("out is BFloat16 with a 64-bit", *quant(scale=bits))
    refused("out is Char with a Float", *quant(out=int8))
    refused("scale of x2 is Half", *quant(scale=torch.ones(32).half()))
    refused("pertokenScale has shape", *quant(tokens=torch.ones(3)))
    refused("scale has 31 values", *quant(scale=torch.ones(31)))
    refused("bias is Half", *quant(bias=torch.ones(32).half()))
    refused("bias is Float", *quant(scale=bits, out=half, bias=torch.ones(32)))
    refused("bias has shape", *quant(bias=torch.ones(31)))
    refused("out has shape", *quant(out=torch.empty(4, 31, dtype=torch.bfloat16)))
    refused("out is Float", *quant(out=torch.empty(4, 32)))
    refused("out has shape", *quant(out=torch.empty(1, 4, 32, dtype=torch.bfloat16)))
    refused("x1 must be ND", *quant(x1=Nz(torch.zeros(4, 64, dtype=torch.int8))))
    column = {"x2": Nz(torch.zeros(64, 1, dtype=torch.int8)), "scale": torch.ones(1)}
    narrow = quant(**column, out=torch.empty(4, 1, dtype=torch.bfloat16))
    refused("must not be 1 in FRACTAL_NZ", *narrow)
    with in_release("8.5.0"):
        call(*narrow)
    batches = {"x1": torch.zeros(3, 4, 64, dtype=torch.int8), "x2": torch.zeros(2, 64, 32, dtype=torch.int8)}
    refused(
        "the batches do not broadcast", *quant(**batches, out=torch.empty(3, 4, 32, dtype=torch.bfloat16))
    )
    wide = torch.zeros(1, 65536, dtype=torch.int8)
    column = wide.t().contiguous()
    refused("at most 65535", *quant(x1=wide, x2=column, scale=bits[:1], out=half[:1, :1]))
    of_rows = quant(x1=wide, x2=column, scale=torch.ones(1), tokens=torch.ones(1), out=half[:1, :1])
    call(*of_rows)
    with in_release("9.0.0"):
        refused("at most 65535", *of_rows)
    four = {"x1": torch.zeros(4, 8, dtype=torch.int32), "x2": torch.zeros(64, 4, dtype=torch.int32)}
    refused("needs the scale of x1", *quant(**four))
    refused(
        "must not be transposed", *quant(**(four | {"x1": torch.zeros(64, 8, dtype=torch.int32)}), t1=True)
    )
    with on_soc("310P"):
        refused("310P: a 64-bit scale", *quant())
        refused("x1 is Int", *quant(**four))
        refused(
            "NZ x2 transposed", *quant(scale=bits, out=half, x2=Nz(torch.zeros(64, 32, dtype=torch.int8)))
        )
        refused("x2 in NZ", *quant(tokens=torch.ones(4), out=half))


def quant5(**changed):
    arguments = {
        "x1": torch.zeros(4, 256, dtype=torch.int8),
        "x2": torch.zeros(128, 256, dtype=torch.int8),
        "s1": torch.ones(4, 2),
        "s2": torch.ones(1, 2),
        "ys": None,
        "o1": None,
        "o2": None,
        "yo": None,
        "bias": None,
        "t1": False,
        "t2": True,
        "group": 128 | 128 << 16 | 1 << 32,
        "out": torch.empty(4, 128, dtype=torch.bfloat16),
    }
    return "aclnnQuantMatmulV5", *(arguments | changed).values()


def test_limits_of_block_scales_and_of_8_by_4_bits():
    refused("of int8 .1, 128, 128.", *quant5(group=64 | 128 << 16 | 1 << 32))
    refused("x1Scale has shape", *quant5(s1=torch.ones(4)))
    refused("x2Scale has shape", *quant5(s2=torch.ones(2, 1)))
    refused("need x2 transposed", *quant5(x2=torch.zeros(256, 128, dtype=torch.int8), t2=False))
    refused("out with groupSize is Half", *quant5(out=torch.empty(4, 128, dtype=torch.float16)))
    refused("yScale is not supported", *quant5(ys=torch.ones(1)))
    refused("x1Offset is not supported", *quant5(o1=torch.ones(1)))
    refused("yOffset belongs to", *quant5(yo=torch.ones(1)))
    mixed = {"x2": torch.zeros(256, 16, dtype=torch.int32), "t2": False, "group": 256}
    refused("needs a 64-bit x2Scale", *quant5(**mixed))
    bits = torch.ones(1, 128, dtype=torch.int64)
    refused("yOffset .of int8 x int4. is null", *quant5(**mixed, s2=bits), code=161001)
    refused("x1Scale of m = 4", *quant5(**mixed, s2=bits, yo=torch.ones(128)))
    rows = mixed | {"s2": bits, "yo": torch.ones(128)}
    refused("x1Scale has 1 axes, x2Scale 2", *quant5(**rows, s1=torch.ones(4)))
    refused("x1Scale of int8 x int4 is Long", *quant5(**rows, s1=torch.ones(4, 1).long()))
    refused("takes no bias", *quant5(**rows, s1=torch.ones(4, 1), bias=torch.ones(1, 128)))
    short = torch.empty(3, 128, dtype=torch.bfloat16)
    refused("out has shape", *quant5(**rows, s1=torch.ones(4, 1), out=short))
