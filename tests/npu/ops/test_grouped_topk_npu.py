"""The router of groups of experts (DeepSeek V3) as one operator, by itself and in recorded steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cann_sim.trace import recording
from npu.test_launches import deepseek
from support import calls

import liteboost_adaptor
from liteboost_adaptor import native_npu
from liteboost_adaptor.ops.fused_experts import grouped_topk as reference

OP = "_npu_grouped_topk"


def run(logits: torch.Tensor, bias: torch.Tensor, *numbers: Any) -> tuple[list[torch.Tensor], list[str]]:
    op = getattr(torch.ops.liteboost, OP)
    op(logits.npu(), bias.npu(), *numbers)  # compared first
    torch.ops.liteboost._npu_forget_counts()
    with recording() as trace:
        found = op(logits.npu(), bias.npu(), *numbers)
    return [each.cpu() for each in found], [name for name in trace.ops if "Gating" in name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("k", "groups", "topk_group"), [(8, 8, 4), (4, 4, 1), (6, 1, 1)])
def test_one_launch(dtype: torch.dtype, k: int, groups: int, topk_group: int) -> None:
    logits = torch.stack([torch.randperm(64) for _ in range(5)]).to(dtype) / 16 - 2
    bias, numbers = torch.randn(64) / 8, (k, groups, topk_group, 2.5, 1e-20)
    (scores, index), launches = run(logits, bias, *numbers)
    assert launches == ["aclnnMoeGatingTopK"] and native_npu.calls() == [(OP, "", 1)]
    wanted, experts = reference(logits.double(), bias.double(), *numbers)
    assert torch.equal(index, experts) and index.dtype == torch.int32 and scores.dtype == dtype
    torch.testing.assert_close(scores.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize(
    ("experts", "k", "groups", "reason"),
    [(8, 2, 8, "groups of one expert"), (1040, 2, 65, "more than 2048 experts, with groups padded to 32")],
)
def test_what_the_operator_does_not_take(experts: int, k: int, groups: int, reason: str) -> None:
    logits, bias = torch.randn(3, experts), torch.zeros(experts)
    refusal = torch.ops.liteboost._npu_grouped_topk_refusal(logits.npu(), bias.npu(), k, groups, 2)
    assert refusal == reason


def test_a_model_gives_the_text_of_single_steps_and_is_captured(level: int) -> None:
    if level != 2:
        pytest.skip("programs are of level 2")
    model = deepseek(2, dense=1)
    ids = torch.randint(3, 1000, (1, 9), generator=torch.Generator().manual_seed(1)).npu()
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 60, "eos_token_id": None}
    liteboost_adaptor.apply(model, level=1)
    expected = model.generate(ids, **options)
    liteboost_adaptor.undo(model)
    liteboost_adaptor.apply(model, level=2)
    torch.ops.liteboost._npu_forget_counts()
    with calls.served() as served:
        found = model.generate(ids, **options)
    assert torch.equal(found, expected)
    assert served.rules["step.program"] and served.rules["step.graph"]
    assert (OP, "") in {(op, reason) for op, reason, _ in native_npu.calls()}
