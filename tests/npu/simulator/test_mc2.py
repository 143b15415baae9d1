"""Matrix products fused with collectives, on the simulator's hccl, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from .operators import call, close, integers, normal, on_soc, refused
from .ranks import on_ranks

DTYPES = (torch.float16, torch.bfloat16)


def shares(dtype, m, k, n, ranks):
    """x1, x2 and bias of each rank."""
    return [
        (
            normal((m, k), dtype, 10 * r),
            normal((k, n), dtype, 10 * r + 1, 0.1),
            normal((n,), dtype, 10 * r + 2),
        )
        for r in range(ranks)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_matmul_all_reduce(dtype, ranks):
    data, extra = shares(dtype, 5, 33, 7, ranks), normal((5, 7), dtype, 99)

    def body(group, rank):
        x1, x2, bias = data[rank]
        plain, with_x3 = torch.empty(5, 7, dtype=dtype), torch.empty(1, 5, 7, dtype=dtype)
        call("aclnnMatmulAllReduce", x1, x2, bias, group, "sum", 0, 1, plain)
        call("aclnnMatmulAllReduceV2", x1[None], x2, None, extra[None], group, "sum", 0, 1, with_x3)
        return plain, with_x3

    results = on_ranks(ranks, body)
    product = [(x1.double() @ x2.double(), bias.double()) for x1, x2, bias in data]
    for plain, with_x3 in results:
        close(
            plain,
            sum(p + b for p, b in product),
            roundings=2,
            inside=2e-3 if dtype == torch.float16 else 1e-2,
        )
        close(
            with_x3[0],
            sum(p + extra.double() for p, _ in product),
            roundings=2,
            inside=2e-3 if dtype == torch.float16 else 1.5e-2,
        )
    assert all(torch.equal(results[0][0], plain) for plain, _ in results)


@pytest.mark.parametrize("group_size", [0, 32])
def test_weight_quant_matmul_all_reduce(group_size):
    m, k, n, dtype = 3, 70, 9, torch.bfloat16
    weight = [integers(-128, 127, (k, n), r) for r in range(2)]
    shape = (3, n) if group_size else (n,)
    scale = [normal(shape, dtype, 10 + r, 0.02) for r in range(2)]
    offset = [integers(-4, 4, shape, 20 + r).to(dtype) for r in range(2)]
    x = [normal((m, k), dtype, 30 + r) for r in range(2)]

    def body(group, rank):
        out = torch.empty(m, n, dtype=dtype)
        call(
            "aclnnWeightQuantMatmulAllReduce",
            x[rank],
            weight[rank],
            None,
            scale[rank],
            offset[rank],
            None,
            group,
            "sum",
            0,
            1,
            group_size,
            out,
        )
        return out

    rows = (lambda t: t.repeat_interleave(32, 0)[:k]) if group_size else (lambda t: t)
    real = 0
    for r in range(2):
        w = ((weight[r].double() + rows(offset[r].double())) * rows(scale[r].double())).float().to(dtype)
        real = real + x[r].double() @ w.double()
    for out in on_ranks(2, body):
        close(out, real, roundings=2, inside=1e-2)


@pytest.mark.parametrize("in_place", [False, True])
def test_matmul_all_reduce_add_rms_norm(in_place):
    dtype = torch.float16
    data = shares(dtype, 6, 40, 24, 2)
    residual, gamma = normal((2, 3, 24), dtype, 97), normal((24,), dtype, 98)

    def body(group, rank):
        x1, x2, bias = data[rank]
        y, normed = residual.clone(), torch.empty(2, 3, 24, dtype=dtype)
        if in_place:
            call(
                "aclnnInplaceMatmulAllReduceAddRmsNorm",
                x1,
                x2,
                bias,
                y,
                gamma,
                1e-6,
                group,
                "sum",
                0,
                1,
                normed,
            )
        else:
            call(
                "aclnnMatmulAllReduceAddRmsNorm",
                x1,
                x2,
                bias,
                residual,
                gamma,
                1e-6,
                group,
                "sum",
                0,
                1,
                y,
                normed,
            )
        return y, normed

    total = (
        sum(x1.double() @ x2.double() + bias.double() for x1, x2, bias in data).view(2, 3, 24)
        + residual.double()
    )
    for y, normed in on_ranks(2, body):
        close(y, total, roundings=3, inside=2e-3)
        sums = y.double()  # the norm is of the rounded sum
        close(
            normed,
            sums / torch.sqrt((sums * sums).mean(-1, keepdim=True) + 1e-6) * gamma.double(),
            inside=1e-6,
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_and_scatter_of_rows(dtype):
    data = shares(dtype, 4, 256, 6, 2)

    def body(group, rank):
        x1, x2, _ = data[rank]
        out, gathered = torch.empty(8, 6, dtype=dtype), torch.empty(8, 256, dtype=dtype)
        call("aclnnAllGatherMatmul", x1, x2, None, group, 0, 0, 1, out, gathered)
        part = torch.empty(2, 6, dtype=dtype)
        call("aclnnMatmulReduceScatter", x1, x2, None, group, "sum", 0, 1, part)
        return out, gathered, part

    everything = torch.cat([x1 for x1, _, _ in data])
    total = sum(x1.double() @ x2.double() for x1, x2, _ in data)
    for rank, (out, gathered, part) in enumerate(on_ranks(2, body)):
        assert torch.equal(gathered, everything)
        close(out, everything.double() @ data[rank][1].double(), inside=1e-6)
        close(part, total[2 * rank : 2 * rank + 2], roundings=2, inside=1e-2)


def test_limits_of_collective_products():
    half = torch.float16

    def body(group, rank):
        x1, x2, out = (
            torch.zeros(4, 256, dtype=half),
            torch.zeros(256, 6, dtype=half),
            torch.empty(4, 6, dtype=half),
        )

        def reduce(**changed):
            arguments = {
                "x1": x1,
                "x2": x2,
                "bias": None,
                "group": group,
                "op": "sum",
                "turn": 0,
                "mode": 1,
                "out": out,
            }
            return "aclnnMatmulAllReduce", *(arguments | changed).values()

        refused("x1 is Float", *reduce(x1=x1.float()))
        refused("x2 is BFloat16", *reduce(x2=x2.bfloat16()))
        refused("x1 has k = 256, x2 has 6", *reduce(x2=x2.t().contiguous()))
        refused("bias has shape", *reduce(bias=x1[0, :3]))
        refused("output has shape", *reduce(out=out[:3]))
        refused("reduceOp 'max'", *reduce(op="max"))
        refused("streamMode 0", *reduce(mode=0))
        refused("x1 must not be transposed", *reduce(x1=torch.zeros(256, 4, dtype=half).t()))
        refused("no communicator has the name 'other'", *reduce(group="other"))
        refused("group is empty", *reduce(group=""))
        narrow = {"x1": x1[:, :255].contiguous(), "x2": x2[:255]}
        gather = [x1, x2, None, group, 0, 0, 1, torch.empty(8, 6, dtype=half), None]
        refused("k is 255", "aclnnAllGatherMatmul", *narrow.values(), *gather[2:])
        refused("bias is not supported", "aclnnAllGatherMatmul", x1, x2, x1[0, :6], *gather[3:])
        refused("gatherIndex 1", "aclnnAllGatherMatmul", x1, x2, None, group, 1, 0, 1, *gather[7:])
        odd = torch.zeros(3, 256, dtype=half)
        refused(
            "divisible by the 2 ranks", "aclnnMatmulReduceScatter", odd, x2, None, group, "sum", 0, 1, out[:1]
        )
        residual = torch.zeros(4, 6, dtype=half)
        refused(
            "residual has 2 axes",
            "aclnnMatmulAllReduceAddRmsNorm",
            x1,
            x2,
            None,
            residual,
            residual[0],
            1e-6,
            group,
            "sum",
            0,
            1,
            residual,
            residual,
        )
        scale = torch.ones(6, dtype=half)
        refused(
            "antiquantGroupSize 31",
            "aclnnWeightQuantMatmulAllReduce",
            x1,
            x2.char(),
            None,
            scale,
            None,
            None,
            group,
            "sum",
            0,
            1,
            31,
            out,
        )
        return True

    assert on_ranks(2, body) == [True, True]


def test_a_group_of_three_ranks_is_refused():
    def body(group, rank):
        x = torch.zeros(3, 3, dtype=torch.float16)
        refused("3 ranks", "aclnnMatmulAllReduce", x, x, None, group, "sum", 0, 1, torch.empty_like(x))
        return True

    assert on_ranks(3, body) == [True] * 3


def test_reducing_products_are_of_910b_only():
    x = torch.zeros(4, 4, dtype=torch.float16)
    for soc in ("910C", "310P"):
        with on_soc(soc):
            refused("not supported on", "aclnnMatmulAllReduce", x, x, None, "group", "sum", 0, 1, x.clone())
