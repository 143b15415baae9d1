"""Matrix products fused with collectives, on the simulator's hccl, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from .operators import call, close, in_release, normal, on_soc, refused
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
    data = shares(dtype, 5, 33, 7, ranks)

    def body(group, rank):
        x1, x2, bias = data[rank]
        plain, batched = torch.empty(5, 7, dtype=dtype), torch.empty(1, 5, 7, dtype=dtype)
        call("aclnnMatmulAllReduce", x1, x2, bias, group, "sum", 0, 1, plain)
        call("aclnnMatmulAllReduce", x1[None], x2, None, group, "sum", 0, 1, batched)
        of_nothing = torch.empty_like(plain)
        call("aclnnMatmulAllReduce", x1[:, :0], x2[:0], bias, group, "sum", 0, 1, of_nothing)
        assert torch.equal(of_nothing[0], of_nothing[4])
        return plain, batched, of_nothing[0]

    results = on_ranks(ranks, body)
    products = [x1.double() @ x2.double() for x1, x2, _ in data]
    biases = [bias.double() for _, _, bias in data]
    allowed = {"roundings": 2, "inside": 2e-3 if dtype == torch.float16 else 1e-2}
    for plain, batched, of_nothing in results:
        close(plain, sum(products) + sum(biases), **allowed)
        close(batched[0], sum(products), **allowed)
        close(of_nothing, sum(biases), **allowed)
    assert all(torch.equal(results[0][0], plain) for plain, *_ in results)


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
        return True

    assert on_ranks(2, body) == [True, True]


def test_a_group_of_three_ranks_is_refused():
    def body(group, rank):
        x = torch.zeros(3, 3, dtype=torch.float16)
        refused("3 ranks", "aclnnMatmulAllReduce", x, x, None, group, "sum", 0, 1, torch.empty_like(x))
        return True

    assert on_ranks(3, body) == [True] * 3


def test_before_9_0_0_no_output_is_empty():
    x1, x2 = torch.zeros(0, 4, dtype=torch.float16), torch.zeros(4, 4, dtype=torch.float16)
    of_nothing = "aclnnMatmulAllReduce", x1, x2, None, "group", "sum", 0, 1, x1.clone()
    with in_release("8.5.0"):
        refused("output is empty", *of_nothing)
    refused("no communicator", *of_nothing)


def test_reducing_products_are_of_910b_only():
    x = torch.zeros(4, 4, dtype=torch.float16)
    for soc in ("910C", "310P"):
        with on_soc(soc):
            refused("not supported on", "aclnnMatmulAllReduce", x, x, None, "group", "sum", 0, 1, x.clone())
