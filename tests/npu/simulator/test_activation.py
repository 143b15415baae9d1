"""Gated activations of the simulator against float64, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from npu.simulator.calls import FLOATS, close, randn, refused, run, started, strided
from torch.nn import functional as F


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape, dim", [((3, 5, 34), -1), ((4, 6), 0), ((2, 6, 7), 1)])
def test_swiglu(dtype: torch.dtype, shape: tuple[int, ...], dim: int) -> None:
    x = randn(*shape, dtype=dtype)
    left, right = x.chunk(2, dim)
    close(
        run("aclnnSwiGlu", x, dim, torch.empty_like(left).contiguous())[2],
        F.silu(left.double()) * right.double(),
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_geglu(dtype: torch.dtype, approximate: str) -> None:
    x = randn(3, 5, 34, dtype=dtype)
    left, right = x.double().chunk(2, -1)
    empty = torch.empty(3, 5, 17, dtype=dtype)
    code = int(approximate == "tanh")
    out, gelu = run("aclnnGeGluV3", strided(x), -1, code, True, empty, empty.clone())[-2:]
    close(out, F.gelu(left, approximate=approximate) * right)
    close(gelu, F.gelu(left, approximate=approximate))
    right_activated = run("aclnnGeGluV3", x, -1, code, False, empty, empty.clone())[-2]
    close(right_activated, left * F.gelu(right, approximate=approximate))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_clipped_swiglu(dtype: torch.dtype, interleaved: bool) -> None:
    x = randn(5, 34, dtype=dtype) * 8
    a, b = (x[:, ::2], x[:, 1::2]) if interleaved else x.chunk(2, -1)
    a, b = a.double().clamp(max=7.0), b.double().clamp(-7.0, 7.0)
    want = a * torch.sigmoid(1.702 * a) * (b + 1.0)
    arguments = -1, 1.702, 7.0, 1.0, interleaved
    close(run("aclnnClippedSwiglu", x, None, *arguments, torch.empty(5, 17, dtype=dtype))[-1], want)
    groups = torch.tensor([1, 0, 2])
    out = run("aclnnClippedSwiglu", x, groups, *arguments, torch.full((5, 17), -1.0, dtype=dtype))[-1]
    close(out[:3], want[:3])
    assert (out[3:] == -1).all()


def test_refusals() -> None:
    x, out = torch.ones(3, 32), torch.ones(3, 16)
    refused("aclnnSwiGlu", strided(x), -1, out, message="x is not contiguous")
    refused("aclnnSwiGlu", x, 2, out, message="dim is 2 of 2 axes")
    refused("aclnnSwiGlu", torch.ones(3, 31), -1, out, message="it must be even")
    refused("aclnnSwiGlu", x, -1, out.half(), message="out is Half, x is Float")
    refused("aclnnSwiGlu", x, -1, x, message="out has shape [3, 32], it must be [3, 16]")
    refused("aclnnGeGluV3", x, -1, 2, True, out, out, message="approximate is 2")
    refused("aclnnGeGluV3", x, -1, 1, True, out, None, message="outGelu is null", code=161001)
    clipped = 1.702, -1.0, 1.0, True, out
    refused("aclnnClippedSwiglu", x, None, -1, *clipped, message="limit is -1, it must be positive")
    clipped = 1.0, 7.0, 1.0, True, out
    refused("aclnnClippedSwiglu", x, torch.ones(2).int(), -1, *clipped, message="groupIndex is Int")


def test_rules_of_310p() -> None:
    x = torch.ones(3, 32, dtype=torch.float16)
    refused("aclnnSwiGlu", x, -1, x[:, :16].contiguous(), message="multiples of 64 only", soc="310P")
    refused("aclnnSwiGlu", x.bfloat16(), -1, x.bfloat16(), message="x is BFloat16", soc="310P")
    wide = torch.ones(3, 64, dtype=torch.float16)
    close(started("310P").run("aclnnSwiGlu", wide, -1, x)[2], F.silu(torch.ones(3, 32, dtype=torch.float64)))
    clipped = 1.0, 7.0, 1.0, True, x[:, :16]
    refused("aclnnClippedSwiglu", x, None, -1, *clipped, message="not supported on", soc="310P")
