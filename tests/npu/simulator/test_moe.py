"""Routing of tokens to experts on the simulator against float64, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from .operators import call, close, integers, normal, on_soc, refused, rounded

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def stable_top_k(x: torch.Tensor, k: int) -> torch.Tensor:
    return torch.argsort(x, dim=-1, descending=True, stable=True)[..., :k]


# ---- choice of experts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("renorm", [0, 1])
def test_softmax_top_k_renormalised(renorm):
    x = normal((5, 11), torch.float16, 2, 2.0)
    y, experts = torch.empty(5, 3, dtype=torch.float16), torch.empty(5, 3, dtype=torch.int32)
    softmax = torch.full((5, 11), 7.0)
    call("aclnnMoeGatingTopKSoftmaxV2", x, None, 3, renorm, True, y, experts, softmax)
    p, chosen = torch.softmax(x.double(), -1), stable_top_k(x.double(), 3)
    assert torch.equal(experts.long(), chosen)
    close(y, torch.softmax(x.double().gather(-1, chosen), -1) if renorm else p.gather(-1, chosen))
    if renorm:
        assert (softmax == 7).all()  # not written
    else:
        close(softmax, p)


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


def test_limits_of_softmax_and_top_k():
    x, soft = normal((4, 16), torch.float16, 1), "aclnnMoeGatingTopKSoftmaxV2"
    y, i = torch.empty(4, 2, dtype=torch.float16), torch.empty(4, 2, dtype=torch.int32)
    refused("x is Double", soft, x.double(), None, 2, 0, False, y, i, None)
    refused("yOut is Float", soft, x, None, 2, 0, False, y.float(), i, None)
    refused("expertIdxOut is Long", soft, x, None, 2, 0, False, y, i.long(), None)
    refused("k is 17 of 16", soft, x, None, 17, 0, False, y, i, None)
    refused("at most 1024", soft, torch.zeros(4, 2000, dtype=torch.float16), None, 1025, 0, False, y, i, None)
    refused("yOut has shape", soft, x, None, 3, 0, False, y, i, None)
    refused("renorm 2", soft, x, None, 2, 2, False, y, i, None)
    refused("softmaxResultOut is Half", soft, x, None, 2, 0, True, y, i, x)
    with on_soc("310P"):
        refused("310P", soft, x, None, 2, 0, False, y, i, None)


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


@pytest.mark.parametrize("count_type", [1, 2])
@pytest.mark.parametrize("row_idx_type", [0, 1])
@pytest.mark.parametrize("quantized", [False, True])
def test_init_routing_of_a_range_of_experts(count_type, row_idx_type, quantized):
    x, idx = normal((6, 8), torch.bfloat16, 4), integers(0, 9, (6, 2), 5, torch.int32)
    first, last = 3, 8
    scale = normal((last - first, 8), torch.float32, 6).abs() + 0.5 if quantized else None
    expanded = torch.empty(12, 8, dtype=torch.int8 if quantized else torch.bfloat16)
    row, row_scale = torch.full((12,), -7, dtype=torch.int32), torch.empty(12)
    counts = torch.empty(
        last - first if count_type == 1 else 10, *([2] if count_type == 2 else []), dtype=torch.int64
    )
    call(
        "aclnnMoeInitRoutingV3",
        x,
        idx,
        scale,
        None,
        12,
        0,
        10,
        0,
        count_type,
        True,
        1 if quantized else -1,
        (first, last),
        row_idx_type,
        expanded,
        row,
        counts,
        row_scale,
    )
    order, place = routed(torch.where((idx >= first) & (idx < last), idx, 1000))
    used = int(((idx >= first) & (idx < last)).sum())
    assert 2 < used < 12
    rows = x[order[:used] // 2]
    if quantized:
        expert = idx.flatten()[order[:used]].long() - first
        real = rows.double() * scale.double()[expert]
        s = real.abs().amax(-1) / 127
        close(row_scale[:used], s)
        rounded(expanded[:used], real / s[:, None])
    else:
        assert torch.equal(expanded[:used], rows)
    if row_idx_type == 0:
        inside = ((idx >= first) & (idx < last)).flatten()
        assert torch.equal(row.long(), torch.where(inside, place, -1))
    else:
        assert torch.equal(row[:used].long(), order[:used]) and (row[used:] == -7).all()
    histogram = torch.bincount(idx.flatten(), minlength=10)[first:last]
    if count_type == 1:
        assert torch.equal(counts, histogram)
    else:
        pairs = [[first + e, n] for e, n in enumerate(histogram.tolist()) if n]
        assert counts.tolist() == pairs + [[0, 0]] * (10 - len(pairs))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mode", [0, 2])
def test_finalize_routing(dtype, mode):
    rows, k, h, experts = 5, 3, 17, 4
    expanded, bias = normal((rows * k, h), dtype, 1), normal((experts, h), dtype, 2)
    x1, x2 = normal((rows, h), dtype, 3), normal((rows, h), dtype, 4)
    scales, idx = normal((rows, k), dtype, 5), integers(0, experts - 1, (rows, k), 6, torch.int32)
    place = torch.randperm(rows * k, generator=torch.Generator().manual_seed(7)).int()
    out = torch.empty(rows, h, dtype=dtype)
    call("aclnnMoeFinalizeRoutingV2", expanded, place, x1, x2, bias, scales, idx, mode, out)
    by_token = place.view(k, rows).t() if mode == 0 else place.view(rows, k)
    part = expanded.double()[by_token.long()] + bias.double()[idx.long()]
    real = x1.double() + x2.double() + (scales.double().unsqueeze(-1) * part).sum(1)
    close(out, real, inside=1e-6)


def test_finalize_routing_skips_dropped_tokens():
    expanded, scales = normal((2, 2, 3), torch.float32, 8), torch.ones(3, 2)
    place = torch.tensor([0, -1, 1, 2, -1, -1], dtype=torch.int32)
    out = torch.empty(3, 3)
    call("aclnnMoeFinalizeRoutingV2", expanded, place, None, None, None, scales, None, 3, out)
    flat = expanded.view(4, 3)
    torch.testing.assert_close(out, torch.stack([flat[0], flat[1] + flat[2], torch.zeros(3)]))
    flat[0] = torch.nan  # nobody has written it, and nobody reads it
    place[0] = -1
    call("aclnnMoeFinalizeRoutingV2", expanded, place, None, None, None, scales, None, 3, out)
    torch.testing.assert_close(out, torch.stack([torch.zeros(3), flat[1] + flat[2], torch.zeros(3)]))


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


def test_limits_of_routing_to_a_range() -> None:
    x, idx = torch.zeros(4, 8), torch.zeros(4, 2, dtype=torch.int32)
    expanded, row, counts = torch.empty(8, 8), torch.empty(8, dtype=torch.int32), torch.empty(3).int()
    v3_counts = torch.empty(3, dtype=torch.int64)

    def v3(**changed):
        arguments = {
            "x": x,
            "idx": idx,
            "scale": None,
            "offset": None,
            "active": 8,
            "capacity": 0,
            "experts": 3,
            "pad": 0,
            "type": 1,
            "flag": True,
            "quant": -1,
            "range": (0, 3),
            "row_type": 0,
            "expanded": expanded,
            "row": row,
            "counts": v3_counts,
            "row_scale": torch.empty(8),
        }
        return "aclnnMoeInitRoutingV3", *(arguments | changed).values()

    refused("activeNum is 4", *v3(active=4))
    refused("dropPadMode 1", *v3(pad=1))
    refused("expertTokensNumType 0", *v3(type=0))
    refused("expertTokensNumFlag", *v3(flag=False))
    refused("quantMode 0", *v3(quant=0))
    refused("expandedXOut is Float", *v3(quant=1))
    refused("activeExpertRange .0, 4. of 3", *v3(range=(0, 4)))
    refused("needs two values", *v3(range=None))
    refused("rowIdxType 2", *v3(row_type=2))
    refused("Out is Int", *v3(counts=counts))
    refused("scale has shape", *v3(scale=torch.ones(3, 8)))
    refused("offset is Half", *v3(offset=torch.ones(4, 8).half()))
    call(*v3(offset=torch.ones(4, 8)))  # not read without quantMode 0
    refused("scaleOut is null|expandedScaleOut is null", *v3(row_scale=None), code=161001)
    with on_soc("310P"):
        refused("310P", *v3())


def test_limits_of_finalizing() -> None:
    expanded, row = torch.empty(8, 8), torch.empty(8, dtype=torch.int32)
    scales, out = torch.ones(4, 2), torch.empty(4, 8)

    def final(**changed):
        arguments = {
            "expanded": expanded,
            "row": row,
            "x1": None,
            "x2": None,
            "bias": None,
            "scales": scales,
            "idx": None,
            "mode": 2,
            "out": out,
        }
        return "aclnnMoeFinalizeRoutingV2", *(arguments | changed).values()

    refused("dropPadMode 4", *final(mode=4))
    refused("with dropPadMode 3", *final(mode=3))
    refused("x2 needs x1", *final(x2=out))
    refused("bias needs expertIdx", *final(bias=torch.ones(3, 8)))
    refused("scales are Half with Float", *final(scales=scales.half()))
    refused("expandedRowIdx has 8 values", *final(scales=None))
    refused("expandedRowIdx is Long", *final(row=row.long()))
    few = {"bias": torch.ones(1, 8), "idx": torch.zeros(4, 2, dtype=torch.int32)}
    refused("bias of fewer experts", *final(**few))
    with on_soc("310P"):
        refused("multiple of 32", *final())
