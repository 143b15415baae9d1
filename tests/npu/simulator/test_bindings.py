"""torch_npu's own bindings pass these operators their arguments in order: as in a direct call."""

from __future__ import annotations

import pytest
import torch

from .operators import call, integers, normal, pack
from .test_grouped_matmul import grouped

torch_npu = pytest.importorskip("torch_npu")
HALF, BF16 = torch.float16, torch.bfloat16


def same(on_device, direct) -> None:
    if isinstance(on_device, torch.Tensor):
        on_device = [on_device]
    assert len(on_device) == len(direct)
    for a, b in zip(on_device, direct, strict=True):
        if b is not None:
            assert a.dtype == b.dtype and torch.equal(a.cpu(), b)


def npu(*tensors):
    return [t.npu() for t in tensors]


@pytest.mark.parametrize("smooth", [False, True])
def test_dynamic_quant(smooth):
    x, factors = normal((3, 5, 16), HALF, 1), normal((16,), HALF, 2) if smooth else None
    y, scale = torch.empty(x.shape, dtype=torch.int8), torch.empty(3, 5)
    call("aclnnDynamicQuant", x, factors, y, scale)
    same(torch_npu.npu_dynamic_quant(x.npu(), smooth_scales=factors.npu() if smooth else None), [y, scale])


def test_int4_packing():
    values = integers(-8, 7, (6, 16), 6, torch.int32)
    same(torch_npu.npu_convert_weight_to_int4pack(values.npu()), [pack(values)])


@pytest.mark.parametrize("bits", [8, 4])
def test_weight_quant_batchmatmul(bits):
    x, bias = normal((3, 64), BF16, 7), normal((16,), torch.float32, 8)
    high = 2 ** (bits - 1) - 1
    weight = integers(-high - 1, high, (64, 16), 9)
    weight = pack(weight) if bits == 4 else weight
    scale, offset = normal((2, 16), BF16, 10), integers(-3, 3, (2, 16), 11).to(BF16)
    y = torch.empty(3, 16, dtype=BF16)
    call("aclnnWeightQuantBatchMatmulV2", x, weight, scale, offset, None, None, bias, 32, y)
    a, w, s, o, b = npu(x, weight, scale, offset, bias)
    same(torch_npu.npu_weight_quant_batchmatmul(a, w, s, o, bias=b, antiquant_group_size=32), [y])


def test_quant_matmul():
    x1, x2 = integers(-128, 127, (4, 32), 12), integers(-128, 127, (32, 16), 13)
    scale, tokens = normal((16,), torch.float32, 14, 0.01), normal((4,), torch.float32, 15).abs()
    bias = integers(-99, 99, (16,), 16, torch.int32)
    out = torch.empty(4, 16, dtype=BF16)
    call("aclnnQuantMatmulV4", x1, x2, scale, None, tokens, bias, False, False, out)
    a, b, s, t, i = npu(x1, x2, scale, tokens, bias)
    same(torch_npu.npu_quant_matmul(a, b, s, pertoken_scale=t, bias=i, output_dtype=BF16), [out])


def test_routing():
    x, bias = normal((5, 16), torch.float32, 40), normal((16,), torch.float32, 41)
    y, i = torch.empty(5, 3), torch.empty(5, 3, dtype=torch.int32)
    call("aclnnMoeGatingTopK", x, bias, 3, 2, 4, 1, 0, 1, False, 2.5, 1e-20, y, i, None)
    options = {"k_group": 2, "group_count": 4, "group_select_mode": 1, "norm_type": 1}
    options |= {"bias": bias.npu(), "routed_scaling_factor": 2.5}
    same(torch_npu.npu_moe_gating_top_k(x.npu(), 3, **options), [y, i, None])


def test_grouped_matmul():
    x, weight, groups = normal((6, 8), HALF, 50), normal((3, 8, 4), HALF, 51), torch.tensor([2, 2, 6])
    out = torch.empty(6, 4, dtype=HALF)
    call(*grouped(x, weight, out, groups, split=3))
    a, w, g = npu(x, weight, groups)
    same(torch_npu.npu_grouped_matmul([a], [w], group_list=g, split_item=3, group_type=0), [out])
    i8, w8 = integers(-99, 99, (6, 8), 52), integers(-99, 99, (3, 8, 4), 53)
    scale, tokens = normal((3, 4), BF16, 54, 0.01), normal((6,), torch.float32, 55)
    out8 = torch.empty(6, 4, dtype=BF16)
    call(*grouped(i8, w8, out8, groups, scale=scale, tokens=tokens, split=3))
    x8, w8, s, t = npu(i8, w8, scale, tokens)
    options = {"group_list": g, "split_item": 3, "group_type": 0, "output_dtype": BF16}
    result = torch_npu.npu_grouped_matmul([x8], [w8], scale=[s], per_token_scale=[t], **options)
    same(result, [out8])


def test_delta_rules():
    q, k = normal((4, 2, 8), BF16, 60), normal((4, 2, 8), BF16, 61, 0.3)
    v, beta, g = (
        normal((4, 4, 6), BF16, 62),
        normal((4, 4), BF16, 63).abs(),
        -normal((4, 4), torch.float32, 64).abs(),
    )
    state, lengths = normal((5, 4, 6, 8), BF16, 65), torch.tensor([1, 3], dtype=torch.int32)
    index, accepted = torch.tensor([4, 0, 2, 1], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32)
    on_device, out = state.npu(), torch.empty(4, 4, 6, dtype=BF16)
    call("aclnnRecurrentGatedDeltaRule", q, k, v, beta, state, lengths, index, g, None, accepted, 0.25, out)
    a, b, c, d, n, i, m, h = npu(q, k, v, beta, lengths, index, accepted, g)
    options = {"beta": d, "scale": 0.25, "g": h}
    options |= {"actual_seq_lengths": n, "ssm_state_indices": i, "num_accepted_tokens": m}
    result = torch_npu.npu_recurrent_gated_delta_rule(a, b, c, on_device, **options)
    same([result, on_device], [out, state])


def test_a_refusal_reaches_the_caller():
    x = torch.zeros(4, 8, dtype=torch.int8).npu()
    with pytest.raises(RuntimeError, match="x is Char"):
        torch_npu.npu_dynamic_quant(x)
