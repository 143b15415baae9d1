"""Routing of tokens to experts on the simulator against float64, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from .operators import call, close, integers, normal, on_soc, refused

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def stable_top_k(x: torch.Tensor, k: int) -> torch.Tensor:
    return torch.argsort(x, dim=-1, descending=True, stable=True)[..., :k]


# ---- choice of experts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [0, 1])
@pytest.mark.parametrize("select_mode", [0, 1])
def test_gating_by_groups_chooses_with_the_bias_and_weighs_without(norm_type, select_mode):
    x, bias = normal((6, 24), torch.float32, 3), normal((24,), torch.float32, 4, 0.3)
    k, groups, k_group = 5, 4, 2
    y, experts, normed = torch.empty(6, k), torch.empty(6, k, dtype=torch.int32), torch.empty(6, 24)
    attributes = k, k_group, groups, select_mode, 0, norm_type, True, 2.5, 1e-20
    call("aclnnMoeGatingTopK", x, bias, *attributes, y, experts, normed)
    score = torch.sigmoid(x.double()) if norm_type else torch.softmax(x.double(), -1)
    choice = score + bias.double()
    grouped = choice.view(6, groups, -1)
    strength = grouped.topk(2, -1).values.sum(-1) if select_mode else grouped.amax(-1)
    for row in range(6):
        open_groups = stable_top_k(strength[row], k_group)
        allowed = [e for e in range(24) if e // 6 in open_groups]
        best = sorted(allowed, key=lambda e: -choice[row, e].item())[:k]
        assert experts[row].tolist() == best
        weights = score[row, best]
        close(y[row], weights * 2.5 / (weights.sum() if norm_type else 1), roundings=2)
    close(normed, score)


def test_limits_of_gating():
    y, i = torch.empty(4, 2), torch.empty(4, 2, dtype=torch.int32)

    def gating(**changed):
        arguments = {
            "x": torch.zeros(4, 64),
            "bias": None,
            "k": 2,
            "k_group": 1,
            "groups": 1,
            "select": 1,
            "renorm": 0,
            "norm": 1,
            "flag": False,
            "factor": 1.0,
            "eps": 1e-20,
            "y": y,
            "i": i,
            "out": None,
        }
        return "aclnnMoeGatingTopK", *(arguments | changed).values()

    refused("yOut has shape", *gating(k=3))
    refused("renorm 1", *gating(renorm=1))
    refused("normType 2", *gating(norm=2))
    refused("groupCount 3 must divide", *gating(groups=3))
    refused("kGroup 3", *gating(k_group=3, groups=2))
    refused("k is 33", *gating(k=33, k_group=1, groups=2))
    refused("a group has 1 experts", *gating(groups=64))
    refused("at most 2048", *gating(x=torch.zeros(4, 2049)))
    refused("padded to 32", *gating(x=torch.zeros(4, 520), groups=65))
    refused("bias has shape", *gating(bias=torch.zeros(63)))


# ---- order of experts, and back --------------------------------------------------------------------------


def routed(expert_idx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(choice in each place, place of each choice)"""
    order = torch.argsort(expert_idx.flatten().long(), stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel())
    return order, place


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("flag", [0, 1, 2])
@pytest.mark.parametrize("active", [0, 7])
def test_init_routing(dtype, flag, active):
    x, idx = normal((5, 9), dtype, 1), integers(0, 5, (5, 3), 2, torch.int32)
    rows = active or 15
    expanded, row = torch.empty(rows, 9, dtype=dtype), torch.empty(15, dtype=torch.int32)
    counts = torch.full((6,), -1, dtype=torch.int32)
    call("aclnnMoeInitRoutingV2", x, idx, active, 0, 6, 0, flag, False, expanded, row, counts, None)
    order, place = routed(idx)
    assert torch.equal(expanded, x[order // 3][:rows])
    assert torch.equal(row.long(), place)
    histogram = torch.bincount(idx.flatten(), minlength=6)
    assert torch.equal(counts.long(), [torch.full((6,), -1), histogram.cumsum(0), histogram][flag])


def test_init_routing_drops_and_pads():
    x = normal((4, 5), torch.float16, 3)
    idx = torch.tensor([[1, 2], [1, 0], [1, 2], [1, 0]], dtype=torch.int32)
    expanded, row = torch.empty(3, 3, 5, dtype=torch.float16), torch.empty(8, dtype=torch.int32)
    before = torch.empty(3, dtype=torch.int32)
    call("aclnnMoeInitRoutingV2", x, idx, 0, 3, 3, 1, 0, True, expanded, row, None, before)
    assert before.tolist() == [2, 4, 2]
    assert torch.equal(expanded[1], x[[0, 1, 2]])  # the fourth token of expert 1 is dropped
    assert torch.equal(expanded[0, :2], x[[1, 3]]) and not expanded[0, 2].any()
    assert row.tolist() == [3, 6, 4, 0, 5, 7, -1, 1]


def test_limits_of_routing():
    x, idx = torch.zeros(4, 8), torch.zeros(4, 2, dtype=torch.int32)
    expanded, row, counts = (
        torch.empty(8, 8),
        torch.empty(8, dtype=torch.int32),
        torch.empty(3, dtype=torch.int32),
    )

    def v2(**changed):
        arguments = {
            "x": x,
            "idx": idx,
            "active": 0,
            "capacity": 0,
            "experts": 3,
            "pad": 0,
            "flag": 1,
            "before": False,
            "expanded": expanded,
            "row": row,
            "counts": counts,
            "b": None,
        }
        return "aclnnMoeInitRoutingV2", *(arguments | changed).values()

    refused("expertIdx is Long", *v2(idx=idx.long()))
    refused("x has 4 rows, expertIdx 3", *v2(idx=idx[:3]))
    refused("expandedXOut is Half", *v2(expanded=expanded.half()))
    refused("expandedXOut has shape", *v2(active=3))
    refused("expertTokensCountOrCumsumFlag 3", *v2(flag=3))
    refused("CumsumOut is Long", *v2(counts=counts.long()))
    refused("must not be negative", *v2(active=-1))
    refused("expertNum must be positive", *v2(experts=0))
    refused("dropPadMode 1 needs", *v2(pad=1))
    with on_soc("310P"):
        refused("dropPadMode 1", *v2(pad=1))
