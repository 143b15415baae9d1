"""Dispatch of tokens to the ranks of their experts, and combine, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from .operators import call, close, normal, refused
from .ranks import on_ranks


def routed_data(seed, bs=(3, 2), k=2, experts=4, hidden=32, dtype=torch.bfloat16):
    x = [normal((n, hidden), dtype, seed + r) for r, n in enumerate(bs)]
    ids = [
        torch.stack(
            [
                torch.randperm(experts, generator=torch.Generator().manual_seed(seed + 7 * r + t))[:k]
                for t in range(n)
            ]
        ).int()
        for r, n in enumerate(bs)
    ]
    scales = [
        torch.rand(n, k, generator=torch.Generator().manual_seed(seed + 20 + r)) for r, n in enumerate(bs)
    ]
    return x, ids, scales


def received(ids, rank, local):
    """(expert, rank it comes from, token, choice) of each row, in order."""
    return [
        (e, r, t, j)
        for e in range(rank * local, (rank + 1) * local)
        for r in range(len(ids))
        for t in range(ids[r].shape[0])
        for j in range(ids[r].shape[1])
        if ids[r][t, j] == e
    ]


@pytest.mark.parametrize("version", ["", "V2"])
@pytest.mark.parametrize("quantized", [False, True])
def test_dispatch_and_combine(version, quantized):
    x, ids, scales = routed_data(1)
    smooth = normal((4, 32), torch.float32, 50).abs() + 0.5 if quantized else None
    alg = [""] if version else []
    rows = 2 * 3 * 2  # ranks * most tokens * min(local experts, k)

    def body(group, rank):
        expanded = torch.zeros(rows, 32, dtype=torch.int8 if quantized else torch.bfloat16)
        row_scales, nums = torch.zeros(rows), torch.zeros(2, dtype=torch.int64)
        assist, counts = torch.zeros(rows * 128, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
        call(
            f"aclnnMoeDistributeDispatch{version}",
            x[rank],
            ids[rank],
            smooth,
            None,
            scales[rank],
            group,
            2,
            rank,
            4,
            None,
            0,
            0,
            0,
            0,
            0,
            2 if quantized else 0,
            6,
            1,
            *alg,
            expanded,
            row_scales,
            assist,
            nums,
            counts,
            None,
            None,
        )
        rows_back = expanded.to(torch.bfloat16) * (row_scales[:, None] if quantized else 1)
        out = torch.empty_like(x[rank])
        shared = [None] if version else []
        call(
            f"aclnnMoeDistributeCombine{version}",
            rows_back.to(torch.bfloat16),
            ids[rank],
            assist,
            counts,
            scales[rank],
            None,
            None,
            None,
            None,
            None,
            None,
            *shared,
            group,
            2,
            rank,
            4,
            None,
            0,
            0,
            0,
            0,
            0,
            6,
            0,
            0,
            0,
            *alg,
            out,
        )
        return expanded, row_scales, nums, counts, out

    for rank, (expanded, row_scales, nums, counts, out) in enumerate(on_ranks(2, body)):
        lines = received(ids, rank, 2)
        assert 0 < len(lines) < rows
        for row, (e, r, t, _) in enumerate(lines):
            if quantized:
                real = x[r][t].double() * smooth[e].double()
                s = real.abs().max() / 127
                close(row_scales[row : row + 1], s[None])
                assert (expanded[row].double() - real / s).abs().max() <= 0.501
            else:
                assert torch.equal(expanded[row], x[r][t])
        per_expert = [sum(line[0] == e for line in lines) for e in range(2 * rank, 2 * rank + 2)]
        assert nums.tolist() == per_expert
        by_source = [
            sum(line[:2] == (e, r) for line in lines) for e in range(2 * rank, 2 * rank + 2) for r in range(2)
        ]
        assert counts.tolist() == torch.tensor(by_source).cumsum(0).tolist()
        if not quantized:  # every expert gave its row back unchanged
            close(out, x[rank].double() * scales[rank].double().sum(1, keepdim=True), inside=1e-6)


def test_dispatch_leaves_out_inactive_tokens():
    x, ids, _ = routed_data(2, bs=(3, 3))
    active = torch.tensor([True, True, False])

    def body(group, rank):
        expanded, nums = torch.zeros(12, 32, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64)
        assist, counts = torch.zeros(12 * 128, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
        call(
            "aclnnMoeDistributeDispatchV2",
            x[rank],
            ids[rank],
            None,
            active,
            None,
            group,
            2,
            rank,
            4,
            None,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            None,
            expanded,
            None,
            assist,
            nums,
            counts,
            None,
            None,
        )
        return nums

    for rank, nums in enumerate(on_ranks(2, body)):
        lines = received([part[:2] for part in ids], rank, 2)
        per_expert = [sum(line[0] == e for line in lines) for e in range(2 * rank, 2 * rank + 2)]
        assert nums.tolist() == torch.tensor(per_expert).cumsum(0).tolist()


def test_limits_of_dispatch_and_combine():
    x, ids, scales = routed_data(3, bs=(3, 3))

    def body(group, rank):
        out = torch.empty(12, 32, dtype=torch.bfloat16)

        def dispatch(**changed):
            arguments = {
                "x": x[rank],
                "ids": ids[rank],
                "smooth": None,
                "active": None,
                "scales": scales[rank],
                "group": group,
                "size": 2,
                "rank": rank,
                "experts": 4,
                "tp": None,
                "tps": 0,
                "tpr": 0,
                "shard": 0,
                "shared": 0,
                "shared_ranks": 0,
                "quant": 0,
                "bs": 0,
                "nums": 0,
                "alg": "",
                "expanded": out,
                "row_scales": None,
                "assist": torch.zeros(12 * 128, dtype=torch.int32),
                "token_nums": torch.zeros(2, dtype=torch.int64),
                "counts": torch.zeros(4, dtype=torch.int32),
                "tpc": None,
                "es": None,
            }
            return "aclnnMoeDistributeDispatchV2", *(arguments | changed).values()

        refused("epWorldSize is 4", *dispatch(size=4))
        refused("epRankId is", *dispatch(rank=1 - rank))
        refused("moeExpertNum 3", *dispatch(experts=3))
        refused("TP domain", *dispatch(tps=2))
        refused("shared experts are not simulated", *dispatch(shared_ranks=1))
        refused("quantMode 1", *dispatch(quant=1))
        refused("scales need quantMode 2", *dispatch(smooth=torch.ones(4, 32)))
        refused("expandXOut with quantMode 2 is BFloat16", *dispatch(quant=2))
        refused("expandXOut has shape", *dispatch(expanded=out[:11]))
        refused("divisible by 32", *dispatch(x=x[rank][:, :31].contiguous(), expanded=out[:, :31]))
        refused("expertIds is Long", *dispatch(ids=ids[rank].long()))
        refused("expertTokenNumsType 2", *dispatch(nums=2))
        refused("globalBs is 4", *dispatch(bs=4))
        many = {"x": torch.zeros(257, 32).bfloat16(), "ids": torch.zeros(257, 2).int()}
        refused("at most 256", *dispatch(**many))
        counts, shared = torch.zeros(4, dtype=torch.int32), x[rank].float()
        rest = [group, 2, rank, 4, None, 0, 0, 0, 0, 0, 0, 0, 0, 0, "", torch.empty_like(x[rank])]
        head = [
            out,
            ids[rank],
            torch.zeros(12 * 128).int(),
            counts,
            scales[rank],
            None,
            None,
            None,
            None,
            None,
            None,
        ]
        refused("sharedExpertX is Float", "aclnnMoeDistributeCombineV2", *head, shared, *rest)
        refused("commQuantMode 2", "aclnnMoeDistributeCombineV2", *head, None, *rest[:12], 2, *rest[13:])
        refused(
            "expertScales is BFloat16",
            "aclnnMoeDistributeCombineV2",
            *head[:4],
            scales[rank].bfloat16(),
            *head[5:],
            None,
            *rest,
        )
        return True

    assert on_ranks(2, body) == [True, True]
