"""Activations of 8 bits on an NPU: rounded once for all who read them, and in the norm where it may be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cann_sim.trace import Trace
from npu.marks import decoded
from npu.test_launches import llama

import liteboost_adaptor
from liteboost_adaptor import native_npu
from liteboost_adaptor.program import npu_integers
from liteboost_adaptor.quantization import LiteBoostConfig, quantize_model
from liteboost_adaptor.report import report

#: Query, key, value, output; gate, up, down.
LINEAR = 7
ROUNDS, IN_A_NORM = "aclnnDynamicQuant", "aclnnAddRmsNormDynamicQuant"


pytestmark = pytest.mark.usefixtures("no_grad", "undone")


def made(layers: int) -> torch.nn.Module:
    model = llama(layers).cpu()
    quantize_model(model, LiteBoostConfig("w8a8"))
    return model.npu()


def a_token(model: torch.nn.Module) -> Trace:
    """Of a step that has been recorded, where steps are."""
    return decoded(model, prompt=20, new=40)


@pytest.mark.parametrize("layers", [2, pytest.param(3, marks=pytest.mark.full)])
def test_two_roundings_a_layer_are_left(layers: int) -> None:
    liteboost_adaptor.apply(level=1)
    before = a_token(made(layers))
    liteboost_adaptor.undo()
    assert before.ops.count(ROUNDS) == LINEAR * layers and IN_A_NORM not in before.ops
    liteboost_adaptor.apply(level=2)
    steps = report.counter("step.program")
    served = steps.calls
    after = a_token(made(layers))
    assert steps.calls > served, dict(steps.fallbacks)
    # Before the output and the down projection; the first norm adds nothing, and is read by three.
    assert after.ops.count(ROUNDS) == 2 * layers + 1
    assert after.ops.count(IN_A_NORM) == 2 * layers - 1
    assert after.ops.count("aclnnQuantMatmulV5") == LINEAR * layers
    assert not [why for op, why, _ in native_npu.calls() if op in ("linear_w8a8", "add_rms_norm") and why]


def test_logits_of_recorded_steps_are_near_those_of_others() -> None:
    model = made(2)
    ids = torch.randint(3, 1000, (1, 20), generator=torch.Generator().manual_seed(0)).npu()
    settings = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": None, "pad_token_id": 0}
    settings |= {
        "attention_mask": torch.ones_like(ids),
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    found = {}
    for level in (1, 2):
        liteboost_adaptor.apply(level=level)
        model.generate(ids, **settings)
        found[level] = model.generate(ids, **settings)
        liteboost_adaptor.undo()
    for one, other in zip(found[1].logits, found[2].logits, strict=True):
        assert (one - other).float().norm() <= 0.03 * one.float().norm()
        if not torch.equal(one.argmax(-1), other.argmax(-1)):  # from here on they continue other texts
            best = one.float().topk(2).values[0]
            assert best[0] - best[1] <= 0.03 * best[0].abs()
            break


def test_an_operator_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = torch.ops.liteboost
    native_npu.load()
    x = torch.randn(5, 512).bfloat16().npu()
    assert npu_integers._is_right(x.device, x.dtype, 512)
    npu_integers._is_right.cache_clear()

    def wrong(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
        integers, scales, total = right(x, residual, weight, eps)
        return integers, scales * 1.05, total

    right = ours._npu_add_rms_norm_int8
    monkeypatch.setattr(npu_integers, "_norm", wrong)
    ours._npu_forget_counts()
    try:
        assert not npu_integers._is_right(x.device, x.dtype, 512)
    finally:
        npu_integers._is_right.cache_clear()
    assert ("add_rms_norm", "aclnnAddRmsNormDynamicQuant differs from float64", 1) in native_npu.calls()


def test_an_operator_that_raises_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    native_npu.load()

    def failing(*arguments: Any) -> Any:
        raise RuntimeError("561002\nand more")

    monkeypatch.setattr(npu_integers, "_norm", failing)
    torch.ops.liteboost._npu_forget_counts()
    npu_integers._is_right.cache_clear()
    try:
        assert not npu_integers._is_right(torch.device("npu:0"), torch.bfloat16, 512)
    finally:
        npu_integers._is_right.cache_clear()
    assert ("add_rms_norm", "aclnnAddRmsNormDynamicQuant raises: 561002", 1) in native_npu.calls()
