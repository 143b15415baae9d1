"""Rotary embeddings of the simulator against float64, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from npu.simulator.calls import FLOATS, close, randn, refused, run, started, strided
from torch import Tensor


def rotate64(x: Tensor, interleave: bool = False) -> Tensor:
    x = x.double()
    if interleave:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


def rope64(x: Tensor, cos: Tensor, sin: Tensor, interleave: bool = False) -> Tensor:
    return x.double() * cos.double() + rotate64(x, interleave) * sin.double()


LAYOUTS = {
    "BNSD": ((2, 4, 9, 32), (1, 1, 9, 32)),
    "BNSD, a table each": ((2, 4, 9, 32), (2, 1, 9, 32)),
    "BSND": ((2, 9, 4, 32), (1, 9, 1, 32)),
    "SBND": ((9, 2, 4, 32), (9, 1, 1, 32)),
    "BSND decode": ((3, 1, 40, 128), (3, 1, 1, 128)),
    "TND": ((7, 4, 32), (7, 1, 32)),
    "the same": ((2, 4, 9, 32), (2, 4, 9, 32)),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_rotary_position_embedding(dtype: torch.dtype, name: str) -> None:
    shape, table = LAYOUTS[name]
    x, cos, sin = randn(*shape, dtype=dtype), randn(*table, dtype=dtype), randn(*table, dtype=dtype)
    close(
        run("aclnnRotaryPositionEmbedding", strided(x), cos, sin, 0, torch.empty_like(x))[-1],
        rope64(x, cos, sin),
    )
    if table[0] == 1 or name == "TND":
        out = run("aclnnRotaryPositionEmbedding", x, cos, sin, 1, torch.empty_like(x))[-1]
        close(out, rope64(x, cos, sin, interleave=True))
    for mode in (2, 3):  # of Ascend 950; others compute halves
        out = run("aclnnRotaryPositionEmbedding", x, cos, sin, mode, torch.empty_like(x))[-1]
        close(out, rope64(x, cos, sin))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("packed", [False, True])
def test_apply_rotary_pos_emb_is_in_place(dtype: torch.dtype, packed: bool) -> None:
    lead = (6,) if packed else (2, 3)
    q, k = randn(*lead, 4, 64, dtype=dtype), randn(*lead, 2, 64, dtype=dtype)
    cos, sin = randn(*lead, 1, 64, dtype=dtype), randn(*lead, 1, 64, dtype=dtype)
    for op, mode in (("aclnnApplyRotaryPosEmb", []), ("aclnnApplyRotaryPosEmbV2", ["half"])):
        new_q, new_k = run(op, strided(q), k.clone(), cos, sin, 4 if packed else 1, *mode)[:2]
        for got, x in ((new_q, q), (new_k, k)):
            if dtype == torch.float16:  # computed in float16: each product and the sum round
                parts = (x * cos).double(), (rotate64(x).half() * sin).double()
                close(got, parts[0] + parts[1])
            else:
                close(got, rope64(x, cos, sin))


# ---- what is refused ---------------------------------------------------------------------------
def refused_rotary(
    x: tuple[int, ...], cos: tuple[int, ...], message: str, mode: int = 0, **options: object
) -> None:
    dtype = options.pop("dtype", torch.float32)
    x_, cos_ = torch.ones(x, dtype=dtype), torch.ones(cos, dtype=dtype)
    refused("aclnnRotaryPositionEmbedding", x_, cos_, cos_, mode, x_, message=message, **options)


def test_rotary_refuses() -> None:
    refused_rotary((2, 33, 8, 64), (1, 1, 8, 64), "x in BNSD needs B * N <= 8 * S, B is 2, N 33, S 8")
    refused_rotary((2, 32, 1, 64), (1, 1, 1, 64), "B is 2, N 32, S 1")
    refused_rotary((2, 3, 5, 64), (1, 3, 5, 64), "goes with no layout")
    refused_rotary((2, 2, 4, 24), (1, 1, 4, 24), "no multiple of 32 bytes")
    refused_rotary((2, 9, 4, 31), (1, 9, 1, 31), "D is 31, it must be even")
    refused_rotary((2, 9, 4, 896), (1, 9, 1, 896), "D is 896")
    refused_rotary((2, 9, 1000, 32), (1, 9, 1, 32), "N must be less than 1000")
    refused_rotary((2, 9, 4, 32), (2, 9, 1, 32), "interleave takes 11SD, 1S1D and S11D", mode=1)
    refused_rotary((4, 2, 500, 32), (1, 2, 1, 32), "interleave needs B * N < 1000", mode=1)
    refused_rotary((2, 9, 4, 32), (1, 9, 1, 32), "mode is 4: 0 to 3", mode=4)
    refused_rotary((2, 9, 4, 32), (1, 9, 1, 16), "the last axis of cos is 16")
    x, table = torch.ones(2, 9, 4, 32), torch.ones(1, 9, 1, 32)
    op = "aclnnRotaryPositionEmbedding"
    refused(op, x.half(), table, table, 0, x.half(), message="cos is Float, x is Half")
    refused(op, x, table, table[:, :4], 0, x, message="sin has shape [1, 4, 1, 32]")
    refused(op, x, table, table, 0, strided(x), message="out is not contiguous")
    older = started("910B", "8.1.RC1")
    flat, row = torch.ones(7, 4, 32), torch.ones(7, 1, 32)
    older.refused(op, flat, row, row, 0, flat, message="x has 3 axes, supported are 4 to 4")


def test_rotary_takes_bnsd_within_its_rule() -> None:
    """The edge of B * N <= 8 * S, and the shapes another layout explains."""
    for x, cos in (
        ((2, 32, 8, 64), (1, 1, 8, 64)),
        ((1, 32, 1, 64), (1, 1, 1, 64)),
        ((5, 32, 1, 64), (5, 1, 1, 64)),
    ):
        run("aclnnRotaryPositionEmbedding", torch.ones(x), torch.ones(cos), torch.ones(cos), 0, torch.ones(x))


def test_apply_rotary_pos_emb_refuses() -> None:
    op = "aclnnApplyRotaryPosEmb"

    def tensors(heads: int, d: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        return [torch.ones(2, 3, n, d, dtype=dtype) for n in (heads, 4, 1, 1)]

    refused(op, *tensors(8, 32), 1, message="D is 32, it must be 64 or 128")
    refused(op, *tensors(8, 128), 3, message="layout is 3: 1 (BSND) or 4 (TND)")
    refused(op, *tensors(8, 128), 4, message="queryRef has 4 axes, supported are 3 to 3")
    refused(op, *tensors(73, 128), 1, message="77 heads of 128 need 199168 bytes of the vector core's 196608")
    run(op, *tensors(72, 128), 1)  # one head less just fits
    run(op, *tensors(140, 64), 1)
    q, k, cos, sin = tensors(8, 128)
    refused(op, q, k, cos.float(), sin.float(), 1, message="cos is Float, queryRef is BFloat16")
    refused(op, q, k, cos[:1], sin[:1], 1, message="cos of shape [1, 3, 1, 128] differs from queryRef")
    refused(op, q, k, q, q, 1, message="cos and sin must have one head")
    refused("aclnnApplyRotaryPosEmbV2", q, k, cos, sin, 1, "interleave", message='only "half" is supported')


def test_rules_of_310p() -> None:
    refused_rotary((2, 9, 4, 32), (1, 9, 1, 32), "310P has 0 (half) only", mode=1, soc="310P")
    refused_rotary((2, 9, 4, 160), (1, 9, 1, 160), "310P takes 32, 64, 96 and 128", soc="310P")
    refused_rotary((2, 9, 4, 32), (1, 9, 1, 32), "x is BFloat16", dtype=torch.bfloat16, soc="310P")
    half = [torch.ones(2, 3, n, 64, dtype=torch.float16) for n in (4, 2, 1, 1)]
    got = started("310P").run("aclnnApplyRotaryPosEmbV2", *half, 1, "half")[0]
    assert torch.equal(got, torch.cat((torch.zeros(2, 3, 4, 32), torch.full((2, 3, 4, 32), 2.0)), -1).half())
    bf16 = [x.bfloat16() for x in half]
    refused("aclnnApplyRotaryPosEmbV2", *bf16, 1, "half", message="queryRef is BFloat16", soc="310P")
