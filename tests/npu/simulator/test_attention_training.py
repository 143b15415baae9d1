"""FlashAttentionScore of the simulator against float64, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from npu.simulator.calls import FLOATS, randn, refused, run, strided
from npu.simulator.test_attention import BIG, FIXED_MASK, attention64, band, causal, near, problem
from torch import Tensor


def arguments(
    version: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    layout: str,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float = 0.125,
    keep: float = 1.0,
    pre: int = BIG,
    next_: int = BIG,
    sparse: int = 0,
    precise: int = 0,
    bias_type: int = 1,
    statistics: tuple[int, ...] = (),
) -> tuple[str, list[object]]:
    """The operator's name and its arguments; maximum, sum and output are its last four but one."""
    all_: list[object] = [q, k, v, bias, None, None, mask]
    if version >= 3:
        all_.append(sinks)
    all_.append(None)
    if version >= 2:
        all_ += [None, None]
    all_ += [scale, keep, pre, next_, heads, layout, precise, sparse]
    if version >= 2:
        all_.append(bias_type)
    maximum = torch.empty(*statistics, 8)
    all_ += [maximum, maximum.clone(), None, torch.empty(q.shape, dtype=q.dtype)]
    return "aclnnFlashAttentionScore" + (f"V{version}" if version > 1 else ""), all_


def forward(*positional: object, **options: object) -> list[Tensor]:
    op, all_ = arguments(*positional, **options)
    return run(op, *all_)[-4:]


LAYOUTS = {
    "BNSD": lambda x: x,
    "BSND": lambda x: x.transpose(1, 2),
    "BSH": lambda x: x.transpose(1, 2).flatten(2),
    "SBH": lambda x: x.permute(2, 0, 1, 3).flatten(2),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(dtype: torch.dtype, layout: str) -> None:
    q, k, v = problem(dtype, 2, 4, 2, 5, 7, 24)
    tensors = [LAYOUTS[layout](x) for x in (q, k, v)]
    want, lse = attention64(q, k, v, scale=0.125)
    for version in (1, 2, 3):
        maximum, total, _, out = forward(version, *tensors, 4, layout, statistics=(2, 4, 5))
        near(out, LAYOUTS[layout](want))
        assert (maximum + total.log() - lse).abs().max() < 1e-4


def test_sparse_modes() -> None:
    q, k, v = problem(torch.bfloat16, 2, 4, 2, 5, 7, 32)
    own = torch.rand(2, 1, 5, 7) < 0.4
    own[..., 2] = False
    cases = [
        ({"sparse": 3, "pre": 0, "next_": 0}, None),  # without a mask everything is computed
        ({"mask": own}, own),
        ({"mask": own[0, 0].byte()}, own[0, 0]),
        ({"mask": own, "pre": 3, "next_": 1}, own | band(5, 7, 3, 1, 0)),
        ({"sparse": 1, "mask": own, "pre": 0}, own),
        ({"sparse": 2, "mask": FIXED_MASK}, causal(5, 7, False)),
        ({"sparse": 3, "mask": FIXED_MASK}, causal(5, 7, True)),
        ({"sparse": 4, "mask": FIXED_MASK, "pre": 2, "next_": 1}, band(5, 7, 2, 1, 2)),
    ]
    for options, hidden in cases:
        out = forward(2, q, k, v, 4, "BNSD", precise=2, statistics=(2, 4, 5), **options)[-1]
        near(out, attention64(q, k, v, hidden, scale=0.125)[0])


def test_bias_and_sinks() -> None:
    q, k, v = problem(torch.float32, 2, 4, 2, 5, 7, 32)
    bias, sinks = randn(1, 4, 5, 7), randn(4)
    for version, kind in ((1, 1), (2, 1), (2, 0)):
        scaled = bias * 0.125 if kind == 1 else bias  # 1: added, then both are scaled
        out = forward(version, q, k, v, 4, "BNSD", bias=bias, bias_type=kind, statistics=(2, 4, 5))[-1]
        near(out, attention64(q, k, v, bias=scaled, scale=0.125)[0])
    out = forward(3, q, k, v, 4, "BNSD", sinks=sinks, statistics=(2, 4, 5))[-1]
    near(out, attention64(q, k, v, sinks=sinks, scale=0.125)[0])


def test_v4_on_a_910b_does_what_v3_does() -> None:
    """Its source, though not its document, has it there."""
    q, k, v = problem(torch.float16, 2, 4, 2, 7, 11, 64)
    sinks = torch.tensor([0.5, -0.5, 1.0, 0.0])
    op, of_v3 = arguments(3, q, k, v, 4, "BNSD", sinks=sinks, statistics=(2, 4, 7))
    expected = run(op, *of_v3)[-1]
    scale, keep, pre, next_, heads, layout, precise, sparse, bias_type = of_v3[11:20]
    of_v4 = [*of_v3[:7], *[None] * 5, sinks, *[None] * 5]
    of_v4 += [scale, keep, pre, next_, heads, layout, precise, sparse, 0, bias_type, "", 0, 0, *of_v3[20:]]
    assert torch.equal(run("aclnnFlashAttentionScoreV4", *of_v4)[-1], expected)


def test_strided_inputs() -> None:
    q, k, v = problem(torch.float16, 2, 4, 2, 5, 7, 32)
    out = forward(2, strided(q), strided(k), strided(v), 4, "BNSD", statistics=(2, 4, 5))[-1]
    near(out, attention64(q, k, v, scale=0.125)[0])


def check(message: str, code: int = 161002, d: int = 32, **options: object) -> None:
    q, key = torch.zeros(2, 4, 5, d), torch.zeros(2, 2, 7, d)
    tensors = [options.pop(name, x) for name, x in (("q", q), ("k", key), ("v", key))]
    layout, heads, version = options.pop("layout", "BNSD"), options.pop("heads", 4), options.pop("version", 3)
    op, all_ = arguments(version, *tensors, heads, layout, **{"statistics": (2, 4, 5)} | options)
    refused(op, *all_, message=message, code=code)


def test_refusals() -> None:
    key = torch.zeros(2, 2, 7, 32)
    check('inputLayout "TND"', layout="TND")
    check("key is Half, query is Float", k=key.half())
    check(
        "headNum 4 is no multiple of the 3 heads of key",
        k=torch.zeros(2, 3, 7, 32),
        v=torch.zeros(2, 3, 7, 32),
    )
    check("query has 4 heads, headNum is 8", heads=8)
    check("D of query, key and value is 32, 16, 16", k=key[..., :16], v=key[..., :16])
    check("D is 784, it must be 1 to 768", d=784)
    check("keepProb is 0", keep=0.0)
    check("sparseMode is 7", sparse=7)
    check("sparseMode 2, 3 and 4 take (2048, 2048)", sparse=2, mask=torch.zeros(5, 7, dtype=torch.bool))
    check("attenMask is Float", mask=torch.zeros(5, 7))
    check("attenMask has shape [5, 6]", mask=torch.zeros(5, 6, dtype=torch.bool))
    check("softmaxMaxOut has shape [2, 4, 8]", statistics=(2, 4))
    check("sink is Half", sinks=torch.zeros(4).half())
    check("realShift has shape [5, 7]", bias=torch.zeros(5, 7))
    check("pseType is 4", bias_type=4)


def gradients(x: list[Tensor], out: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, x, dy.double())


def test_gradient() -> None:
    q, k, v = problem(torch.float32, 2, 4, 2, 5, 7, 32)
    dy = randn(2, 4, 5, 32)
    double = [x.double().requires_grad_() for x in (q, k, v)]
    want = gradients(double, attention64(*double, causal(5, 7, True), scale=0.125)[0], dy)
    maximum, total, _, out = forward(1, q, k, v, 4, "BNSD", sparse=3, mask=FIXED_MASK, statistics=(2, 4, 5))
    tensors = q, k, v, dy, None, None, None, FIXED_MASK, maximum, total, None, out, None
    attributes = 0.125, 1.0, BIG, BIG, 4, "BNSD", 0, 3
    outputs = [torch.empty_like(x) for x in (q, k, v)]
    got = run("aclnnFlashAttentionScoreGrad", *tensors, *attributes, *outputs, None)[-4:-1]
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", FLOATS)
def test_packed_sequences(dtype: torch.dtype) -> None:
    parts = [problem(dtype, 1, 4, 2, m, n, 32) for m, n in ((3, 4), (2, 6))]
    q, k, v = (torch.cat([p[i][0].transpose(0, 1) for p in parts]) for i in range(3))
    statistics = torch.empty(5, 4, 8)
    inputs = q, k, v, None, None, None, FIXED_MASK, None, [3, 5], [4, 10]
    attributes = 0.125, 1.0, BIG, BIG, 4, "TND", 0, 3
    outputs = statistics, statistics.clone(), None, torch.empty_like(q)
    out = run("aclnnFlashAttentionVarLenScore", *inputs, *attributes, *outputs)[-1]
    masks = causal(3, 4, True), causal(2, 6, True)
    wants = [attention64(*p, m, scale=0.125)[0][0].transpose(0, 1) for p, m in zip(parts, masks, strict=True)]
    near(out, torch.cat(wants))
