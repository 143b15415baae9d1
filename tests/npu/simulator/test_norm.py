"""Norms of the simulator against float64, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from npu.simulator.calls import FLOATS, close, randn, refused, run, started, strided
from torch import Tensor

EPS = 1e-5


def rms64(x: Tensor, axes: int = 1) -> Tensor:
    return torch.rsqrt(x.double().pow(2).mean(list(range(-axes, 0)), keepdim=True) + EPS)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).double()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape, axes", [((3, 5, 33), 1), ((2, 3, 4, 8), 2), ((1, 1), 1), ((0, 16), 1)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...], axes: int) -> None:
    x, gamma = randn(*shape, dtype=dtype), randn(*shape[-axes:], dtype=dtype)
    rstd = torch.empty(*shape[:-axes], *[1] * axes)
    *_, y, rstd = run("aclnnRmsNorm", x, gamma, EPS, torch.empty_like(x), rstd)
    if not x.numel():
        return
    close(rstd, rms64(x, axes))
    close(y, x.double() * rms64(x, axes) * gamma.double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rms_norm_takes_a_float32_weight(dtype: torch.dtype) -> None:
    x, gamma = randn(4, 40, dtype=dtype), randn(40)
    y = run("aclnnRmsNorm", strided(x), gamma, EPS, torch.empty_like(x), torch.empty(4, 1))[3]
    close(y, x.double() * rms64(x) * gamma.double())


@pytest.mark.parametrize("dtype", FLOATS)
def test_gemma_rms_norm_adds_one_to_the_weight(dtype: torch.dtype) -> None:
    x, gamma = randn(4, 40, dtype=dtype), randn(40, dtype=dtype)
    y = run("aclnnGemmaRmsNorm", x, gamma, EPS, torch.empty_like(x), torch.empty(4, 1))[3]
    close(y, x.double() * rms64(x) * (1 + gamma.double()))


@pytest.mark.parametrize("dtype", FLOATS)
def test_add_rms_norm(dtype: torch.dtype) -> None:
    a, b, gamma = randn(3, 7, 48, dtype=dtype), randn(3, 7, 48, dtype=dtype), randn(48, dtype=dtype)
    outputs = torch.empty_like(a), torch.empty(3, 7, 1), torch.empty_like(a)
    *_, y, rstd, x = run("aclnnAddRmsNorm", strided(a), b, gamma, EPS, *outputs)
    total = rounded(a.double() + b.double(), dtype)
    assert torch.equal(x.double(), total)
    close(rstd, rms64(total))
    close(
        y,
        rounded(total * rms64(total), dtype) * gamma.double(),
        roundings=1.02 if dtype == torch.float32 else 3,
    )


def test_add_rms_norm_norms_the_rounded_sum() -> None:
    """1 + 2^-9 is 1 in bfloat16: normed from the unrounded sum, the large element would come out smaller."""
    a, b = torch.ones(1, 16, dtype=torch.bfloat16), torch.full((1, 16), 2.0**-9, dtype=torch.bfloat16)
    gamma = torch.ones(16, dtype=torch.bfloat16)
    rstd = run(
        "aclnnAddRmsNorm", a, b, gamma, 0.0, torch.empty_like(a), torch.empty(1, 1), torch.empty_like(a)
    )[5]
    assert rstd.item() == 1.0


@pytest.mark.parametrize("with_sum", [True, False])
def test_add_rms_norm_without_rstd(with_sum: bool) -> None:
    a, b, gamma = (randn(*s, dtype=torch.bfloat16) for s in [(3, 7, 48), (3, 7, 48), (1, 48)])
    x = torch.empty_like(a) if with_sum else None
    *_, y, _, x = run("aclnnAddRmsNorm", a, b, gamma, EPS, torch.empty_like(a), None, x)
    total = rounded(a.double() + b.double(), a.dtype)
    close(y, rounded(total * rms64(total), a.dtype) * gamma.double(), roundings=3)
    assert not with_sum or torch.equal(x.double(), total)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("weights", ["both", "float32", "weight", "none"])
def test_layer_norm(dtype: torch.dtype, weights: str) -> None:
    x = randn(3, 5, 33, dtype=dtype)
    kind = torch.float32 if weights == "float32" else dtype
    weight = None if weights == "none" else randn(33, dtype=kind)
    bias = randn(33, dtype=kind) if weights in ("both", "float32") else None
    statistics = torch.empty(3, 5, 1, dtype=dtype), torch.empty(3, 5, 1, dtype=dtype)
    outputs = run("aclnnLayerNorm", x, [33], weight, bias, EPS, torch.empty_like(x), *statistics)
    want = torch.nn.functional.layer_norm(
        x.double(),
        [33],
        None if weight is None else weight.double(),
        None if bias is None else bias.double(),
        EPS,
    )
    close(outputs[5], want)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias_shape", [None, (33,), (4, 33)])
def test_add_layer_norm(dtype: torch.dtype, bias_shape: tuple[int, ...] | None) -> None:
    a, b, gamma, beta = (randn(*s, dtype=dtype) for s in [(4, 33), (4, 33), (33,), (33,)])
    bias = None if bias_shape is None else randn(*bias_shape, dtype=dtype)
    outputs = torch.empty_like(a), torch.empty(4, 1), torch.empty(4, 1), torch.empty_like(a)
    *_, y, mean, rstd, x = run("aclnnAddLayerNorm", a, b, gamma, beta, bias, EPS, True, *outputs)
    total = a.double() + b.double() + (0 if bias is None else bias.double())
    close(y, torch.nn.functional.layer_norm(total, [33], gamma.double(), beta.double(), EPS))
    close(x, total)
    close(mean, total.mean(-1, keepdim=True))
    close(rstd, torch.rsqrt(total.var(-1, unbiased=False, keepdim=True) + EPS))


# ---- what is refused ---------------------------------------------------------------------------
X, GAMMA, RSTD = torch.ones(3, 32), torch.ones(32), torch.ones(3, 1)
HALF = X.half(), GAMMA.half()


def test_rms_norm_refuses() -> None:
    refused("aclnnRmsNorm", X, GAMMA, EPS, X, None, message="rstdOut is null", code=161001)
    refused("aclnnRmsNorm", X, GAMMA, EPS, X, RSTD[:, 0], message="rstdOut has shape [3], it must be [3, 1]")
    refused("aclnnRmsNorm", X, GAMMA, EPS, X, RSTD.half(), message="rstdOut is Half")
    refused("aclnnRmsNorm", X, GAMMA.bfloat16(), EPS, X, RSTD, message="gamma is BFloat16 with x of Float")
    refused("aclnnRmsNorm", X, GAMMA, EPS, X.half(), RSTD, message="yOut is Half, x is Float")
    refused("aclnnRmsNorm", X.double(), GAMMA.double(), EPS, X.double(), RSTD, message="x is Double")
    refused("aclnnRmsNorm", X, torch.ones(16), EPS, X, RSTD, message="gamma has shape [16]")
    refused("aclnnGemmaRmsNorm", X.half(), GAMMA, EPS, X.half(), RSTD, message="gamma is Float, x is Half")


def test_add_rms_norm_refuses() -> None:
    op = "aclnnAddRmsNorm"
    refused(op, X, X, GAMMA, EPS, X, RSTD, None, message="xOut is null and rstdOut is not", code=161001)
    refused(op, X, X, torch.ones(1, 32), EPS, X, None, X, message="float32 needs rstdOut and xOut")
    half, gamma = HALF
    needed = "without rstdOut gamma must have shape [1, 32]"
    refused(op, half, half, gamma, EPS, half, None, None, message=needed)
    refused(op, half, X, gamma, EPS, half, RSTD, half, message="x2 is Float, x1 is Half")
    refused(op, half, half, GAMMA, EPS, half, RSTD, half, message="gamma is Float, x1 is Half")
    refused(op, X, X[:2], GAMMA, EPS, X, RSTD, X, message="x2 has shape [2, 32]")
    refused(op, X, X, GAMMA, -1.0, X, RSTD, X, message="epsilon is -1")


def test_layer_norm_refuses() -> None:
    op = "aclnnLayerNorm"
    refused(op, X, [16], None, None, EPS, X, None, None, message="normalizedShape is [16]")
    refused(op, X, [32], GAMMA.half(), GAMMA, EPS, X, None, None, message="weight is Half, bias is Float")
    refused(
        op, HALF[0], [32], GAMMA, None, EPS, HALF[0], None, None, message="weight is Float with input of Half"
    )
    refused(op, X, None, None, None, EPS, X, None, None, message="normalizedShape is null", code=161001)
    added = X, X, GAMMA, GAMMA, None, EPS, True
    refused("aclnnAddLayerNorm", *added, X, RSTD, RSTD[:, 0], X, message="rstdOut has shape [3]")


def test_rules_of_310p() -> None:
    bf16 = X.bfloat16(), GAMMA.bfloat16()
    half, short = HALF[0], torch.ones(3, 8).half()
    for arguments, message in (
        ((*bf16, EPS, bf16[0], RSTD), "x is BFloat16; supported here: Float, Half"),
        ((half, GAMMA, EPS, half, RSTD), "gamma is Float, x is Half"),
        ((short, short[0], EPS, short, RSTD), "has 16 bytes, 310P needs 32"),
    ):
        refused("aclnnRmsNorm", *arguments, message=message, soc="310P")
    refused("aclnnGemmaRmsNorm", X, GAMMA, EPS, X, RSTD, message="not supported on Ascend310P3", soc="310P")
    refused("aclnnLayerNorm", X, [32], None, None, EPS, X, None, None, message="not supported on", soc="310P")
    outputs = torch.empty_like(X), torch.empty_like(RSTD), torch.empty_like(X)
    *_, y, rstd, _ = started("310P").run("aclnnAddRmsNorm", X, X, GAMMA, 0.0, *outputs)
    assert torch.equal(y, X)
    assert rstd.isnan().all()  # "invalid on this product"
    outputs = torch.empty_like(X), torch.empty_like(RSTD), torch.empty_like(RSTD), torch.empty_like(X)
    *_, y, mean, rstd, _ = started("310P").run(
        "aclnnAddLayerNorm", X, X, GAMMA, GAMMA, None, EPS, True, *outputs
    )
    assert torch.equal(y, torch.ones_like(y))
    assert mean.isnan().all() and rstd.isnan().all()
    mixed = HALF[0], X, GAMMA, GAMMA, None, EPS, True, *outputs
    refused("aclnnAddLayerNorm", *mixed, message="x2 is Float, x1 is Half", soc="310P")
