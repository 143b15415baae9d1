"""Grouped matrix products of the simulator against float64, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from .calls import started
from .operators import call, close, hardware_scale, integers, normal, on_soc, pack, refused

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def grouped(
    x,
    weight,
    out,
    group_list=None,
    *,
    bias=None,
    scale=None,
    offset=None,
    aq_scale=None,
    aq_offset=None,
    tokens=None,
    split=2,
    group_type=0,
    list_type=0,
    activation=0,
):
    some = lambda t: None if t is None else t if isinstance(t, list) else [t]  # noqa: E731
    scales = map(some, (bias, scale, offset, aq_scale, aq_offset, tokens))
    attributes = split, group_type, list_type, activation
    inputs = some(x), some(weight), *scales, group_list, None, None, None
    return "aclnnGroupedMatmulV4", *inputs, *attributes, some(out), None, None


def slices(sizes):
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [(end - n, end) for n, end in zip(sizes, ends, strict=True)]


SIZES = [3, 0, 5, 1]  # a group without rows, and rows after the last group


def group_list(list_type):
    sizes = torch.tensor(SIZES)
    if list_type == 2:  # groups with rows first
        return torch.tensor([[e, n] for e, n in enumerate(SIZES) if n] + [[1, 0]])
    return sizes if list_type else sizes.cumsum(0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("list_type", [0, 1, 2])
def test_grouped_matmul_by_rows(dtype, list_type):
    x, weight = normal((11, 14), dtype, 1), normal((4, 14, 6), dtype, 2)
    bias = normal((4, 6), torch.float16 if dtype == torch.float16 else torch.float32, 3)
    out = torch.full((11, 6), 7.0, dtype=dtype)
    call(*grouped(x, weight, out, group_list(list_type), bias=bias, list_type=list_type))
    for e, (start, end) in enumerate(slices(SIZES)):
        if end > start:
            close(out[start:end], x[start:end].double() @ weight[e].double() + bias[e].double(), inside=1e-6)
    assert (out[9:] == 7).all()  # rows of no group are left as they are


def test_grouped_matmul_of_lists():
    xs = [normal((m, k), torch.float16, 4 + m) for m, k in [(2, 5), (4, 7)]]
    ws = [normal((k, n), torch.float16, 40 + k) for k, n in [(5, 3), (7, 6)]]
    outs = [torch.empty(2, 3, dtype=torch.float16), torch.empty(4, 6, dtype=torch.float16)]
    call(*grouped(xs, ws, outs, split=0, group_type=-1))
    for x, w, out in zip(xs, ws, outs, strict=True):
        close(out, x.double() @ w.double())
    ws = [normal((5, 3), torch.float16, 50 + e) for e in range(2)]
    x, out = normal((6, 5), torch.float16, 60), torch.empty(6, 3, dtype=torch.float16)
    call(*grouped(x, ws, out, torch.tensor([2, 6])))
    close(out, torch.cat([x[:2].double() @ ws[0].double(), x[2:].double() @ ws[1].double()]))


def test_grouped_matmul_by_columns():
    stored, weight = normal((9, 4), torch.bfloat16, 5), normal((9, 3), torch.bfloat16, 6)
    out = torch.empty(3, 4, 3, dtype=torch.bfloat16)
    call(*grouped(stored.t(), weight, out, torch.tensor([4, 4, 9]), group_type=2))
    x = stored.t().double()
    w = weight.double()
    close(out, torch.stack([x[:, :4] @ w[:4], torch.zeros(4, 3).double(), x[:, 4:] @ w[4:]]))


@pytest.mark.parametrize(
    "out_dtype,tokens",
    [
        (torch.bfloat16, False),
        (torch.bfloat16, True),
        (torch.float16, False),
        (torch.float16, True),
        (torch.int32, False),
        (torch.int8, False),
    ],
)
def test_grouped_matmul_of_int8(out_dtype, tokens):
    x, weight = integers(-128, 127, (9, 30), 7), integers(-128, 127, (4, 30, 8), 8)
    bias = integers(-999, 999, (4, 8), 9, torch.int32)
    factor = normal((4, 8), torch.float32, 10, 0.001).abs() + 0.0005
    scale, value = factor, factor.double()
    if out_dtype == torch.bfloat16:
        scale = factor.bfloat16()
        value = scale.double()
    elif out_dtype == torch.int8:
        scale, value = hardware_scale(factor)
    token_scale = normal((9,), torch.float32, 11).abs() if tokens else None
    out = torch.empty(9, 8, dtype=out_dtype)
    call(*grouped(x, weight, out, group_list(0), bias=bias, scale=scale, tokens=token_scale))
    if out_dtype == torch.int32:  # the scale is not read
        plain = torch.empty_like(out)
        call(*grouped(x, weight, plain, group_list(0), bias=bias))
        assert torch.equal(out, plain)
    for e, (start, end) in enumerate(slices(SIZES)):
        if end == start:
            continue
        real = x[start:end].double() @ weight[e].double() + bias[e].double()
        if out_dtype == torch.int32:
            assert torch.equal(out[start:end].double(), real)
            continue
        real = real * value[e] * (token_scale[start:end, None].double() if tokens else 1)
        if out_dtype == torch.int8:
            assert (out[start:end].double() - real.clamp(-128, 127)).abs().max() <= 0.501
        else:
            close(out[start:end], real)


@pytest.mark.parametrize("bits,per_group", [(8, False), (4, False), (4, True)])
def test_grouped_matmul_of_integer_weights(bits, per_group):
    dtype, k, n = torch.bfloat16, 32, 8
    high = 2 ** (bits - 1) - 1
    x, weight = normal((9, k), dtype, 12), integers(-high - 1, high, (4, k, n), 13)
    shape = (4, 4, n) if per_group else (4, n)
    scale = normal(shape, dtype, 14, 0.05)
    offset = torch.zeros(shape, dtype=dtype) if per_group else integers(-3, 3, shape, 15).to(dtype)
    out = torch.empty(9, n, dtype=dtype)
    given = pack(weight) if bits == 4 else weight
    call(*grouped(x, given, out, group_list(1), aq_scale=scale, aq_offset=offset, list_type=1))
    for e, (start, end) in enumerate(slices(SIZES)):
        w = weight[e].double() + (0 if per_group else offset[e].double())
        s = scale[e].double()
        w = (w * (s.repeat_interleave(k // 4, 0) if per_group else s)).float().to(dtype).double()
        if end > start:
            close(out[start:end], x[start:end].double() @ w)


def test_grouped_matmul_of_8_by_4_bits():
    x, weight = integers(-128, 127, (9, 512), 16), integers(-8, 7, (4, 512, 8), 17)
    factor = normal((4, 2, 8), torch.float32, 18, 0.002).abs()
    scale, value = hardware_scale(factor)
    value = value.repeat_interleave(256, 1)
    bias = (8 * weight.double() * value).sum(1).float()
    tokens = normal((9,), torch.float32, 19).abs()
    out = torch.empty(9, 8, dtype=torch.bfloat16)
    scales = {"bias": bias, "scale": scale, "tokens": tokens}
    call(*grouped(x, pack(weight), out, group_list(1), **scales, list_type=1))
    for e, (start, end) in enumerate(slices(SIZES)):
        if end > start:
            real = x[start:end].double() @ (weight[e].double() * value[e]) * tokens[start:end, None].double()
            close(out[start:end], real, inside=1e-5)


@pytest.mark.parametrize("activation", [1, 2, 3, 4, 5])
def test_grouped_matmul_activates_its_output(activation):
    x, weight = integers(-30, 30, (9, 12), 20), integers(-30, 30, (4, 12, 6), 21)
    scale, out = torch.full((4, 6), 0.002), torch.empty(9, 6, dtype=torch.float16)
    call(*grouped(x, weight, out, group_list(0), scale=scale, activation=activation))
    real = torch.cat([x[s:e].double() @ weight[g].double() for g, (s, e) in enumerate(slices(SIZES))]) * 0.002
    gelu = torch.nn.functional.gelu
    expected = [
        torch.relu(real),
        gelu(real, approximate="tanh"),
        gelu(real),
        real * torch.sigmoid(1.702 * real),
        real * torch.sigmoid(real),
    ][activation - 1]
    close(out, expected, inside=1e-6)


def test_limits_of_grouped_matmul():
    half = torch.float16
    x, w, out = torch.zeros(9, 8, dtype=half), torch.zeros(4, 8, 6, dtype=half), torch.empty(9, 6, dtype=half)
    groups = group_list(0)
    refused("with one x needs groupList", *grouped(x, w, out))
    refused("groupList is Int", *grouped(x, w, out, groups.int()))
    refused("groupListType 3", *grouped(x, w, out, groups, list_type=3))
    refused("groupList has 1 axes", *grouped(x, w, out, groups, list_type=2))
    refused("groupType 1", *grouped(x, w, out, groups, group_type=1))
    refused("groupType -1 takes no groupList", *grouped(x, w, out, groups, group_type=-1, split=0))
    refused("splitItem 2 needs one output", *grouped(x, w, [out, out], groups))
    refused("groupType 0 needs splitItem 2 or 3", *grouped(x, w, out, groups, split=0))
    refused("actType 6", *grouped(x, w, out, groups, activation=6))
    refused("out is Float with Half", *grouped(x, w, out.float(), groups))
    refused("weight is Float with Half", *grouped(x, w.float(), out, groups))
    refused("antiquantScale must be given", *grouped(x, w.char(), out, groups))
    i8, scales = w.char(), torch.ones(4, 6, dtype=half)
    one, zero = {"aq_scale": scales}, {"aq_offset": torch.zeros_like(scales)}
    refused("antiquantOffset must be given", *grouped(x, i8, out, groups, **one))
    packed = torch.zeros(4, 8, 1, dtype=torch.int32), torch.empty(9, 8, dtype=half)
    words = grouped(x, *packed, groups, aq_scale=torch.ones(4, 8, dtype=half))
    call(*words)
    earlier = started("910B", "8.5.0").call(*words)
    assert "antiquantOffset must be given" in earlier["message"]
    refused(
        r"antiquantOffset has shape \[4, 3\]", *grouped(x, i8, out, groups, **one, aq_offset=scales[:, :3])
    )
    refused("antiquantScale is Float", *grouped(x, i8, out, groups, aq_scale=scales.float(), **zero))
    by_group = {"aq_scale": scales[:, None].repeat(1, 2, 1), "aq_offset": scales[:, None].repeat(1, 2, 1)}
    refused("8-bit weights take one scale for each output", *grouped(x, i8, out, groups, **by_group))
    refused("bias is Float", *grouped(x, w, out, groups, bias=torch.zeros(4, 6)))
    refused("x must not be transposed", *grouped(torch.zeros(8, 9, dtype=half).t(), w, out, groups))
    refused(
        "needs x transposed",
        *grouped(x, torch.zeros(8, 6, dtype=half), torch.empty(4, 9, 6, dtype=half), groups, group_type=2),
    )
    refused("at most 128 tensors", *grouped([x] * 129, [w[0]] * 129, out, groups))
    i8, scale = (x.char(), w.char()), torch.ones(4, 6)
    refused("int8 x needs scale", *grouped(*i8, out, groups))
    refused("scale is Float with BFloat16", *grouped(*i8, out.bfloat16(), groups, scale=scale))
    refused("scale is BFloat16 with Half", *grouped(*i8, out, groups, scale=scale.bfloat16()))
    refused("bias is Half", *grouped(*i8, out, groups, scale=scale, bias=scale.half()))
    refused("perTokenScale has shape", *grouped(*i8, out, groups, scale=scale, tokens=torch.ones(8)))
    refused("needs groupType 0", *grouped([i8[0]] * 2, [w[0].char()] * 2, [out] * 2, group_type=-1, split=0))
    packed = torch.zeros(4, 8, 1, dtype=torch.int32)
    refused(
        "need a 64-bit scale",
        *grouped(i8[0], packed, torch.empty(9, 8, dtype=half), groups, scale=torch.ones(4, 8)),
    )
    bits = torch.ones(4, 1, 8, dtype=torch.int64)
    refused("needs a Float bias", *grouped(i8[0], packed, torch.empty(9, 8, dtype=half), groups, scale=bits))
    with on_soc("310P"):
        refused("310P takes Half", *grouped(*i8, out, groups, scale=scale))
        refused("310P takes Half", *grouped(x.float(), w.float(), out.float(), groups))
        call(*grouped(x, w, out, groups))
