"""Modeling code that looks like a target and computes something else: refused, with the reason.

Every planted model is Llama's own text with one thing changed, so name, signature, decorators and
Hugging Face tags are right.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import numbers, planted, state, tiny_models

import liteboost_adaptor
from liteboost_adaptor.report import report

#: Everything but the family under test, so that logits of a refused model are exactly the original's.
OTHERS = {
    "norm": ["rope.*", "mlp.*", "attention.*", "linear.*"],
    "rope": ["norm.*", "mlp.*", "attention.*", "linear.*"],
}

NORMS = {
    "rounded before the row is scaled": (
        planted.NORM_ROW,
        "hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon).to(input_dtype)",
    ),
    "weight multiplied before the row is scaled": (
        f"{planted.NORM_ROW}\n        {planted.NORM_RETURN}",
        "scale = torch.rsqrt(variance + self.variance_epsilon)\n"
        "        return ((self.weight * hidden_states.to(input_dtype)) * scale).to(input_dtype)",
    ),
    "variance in the input's dtype": (
        planted.NORM_VARIANCE,
        "variance = hidden_states.to(input_dtype).pow(2).mean(-1, keepdim=True)",
    ),
    "mean absolute value": (
        planted.NORM_VARIANCE,
        "variance = hidden_states.abs().mean(-1, keepdim=True).pow(2)",
    ),
    "clamp at 30": (
        planted.NORM_ROW,
        f"{planted.NORM_ROW}\n        hidden_states = hidden_states.clamp(-30, 30)",
    ),
    "torch.clamp at 30": (
        planted.NORM_ROW,
        f"{planted.NORM_ROW}\n        hidden_states = torch.clamp(hidden_states, -30, 30)",
    ),
    "clamp at 30 in place": (
        planted.NORM_ROW,
        f"{planted.NORM_ROW}\n        hidden_states.clamp_(-30, 30)",
    ),
    "minimum with 30": (
        planted.NORM_ROW,
        f"{planted.NORM_ROW}\n        hidden_states = torch.minimum(hidden_states, torch.tensor(30.0))",
    ),
    "clamp in a helper": (
        planted.NORM_ROW,
        f"{planted.NORM_ROW}\n        hidden_states = _limit(hidden_states)",
    ),
    "branch beyond 4,096 tokens": (
        planted.NORM_ROW,
        f"{planted.NORM_ROW}\n        if hidden_states.shape[1] > 4096:\n"
        "            hidden_states = hidden_states * 1.5",
    ),
    "conditional expression beyond 4,096 tokens": (
        planted.NORM_ROW,
        f"{planted.NORM_ROW}\n        length = hidden_states.shape[1]\n"
        "        hidden_states = hidden_states * (1.5 if length > 4096 else 1)",
    ),
    "length divided by 4,096": (
        planted.NORM_ROW,
        f"{planted.NORM_ROW}\n        hidden_states = hidden_states * (1 + hidden_states.shape[1] // 4096)",
    ),
    "length to a high power": (
        planted.NORM_ROW,
        f"{planted.NORM_ROW}\n        length = hidden_states.shape[1]\n"
        "        hidden_states = hidden_states * (1 + (length / 4096) ** 40)",
    ),
    "loop": (
        planted.NORM_ROW,
        f"{planted.NORM_ROW}\n        for _ in range(hidden_states.shape[0] - 3):\n"
        "            hidden_states = hidden_states * 1.5",
    ),
    "eps outside the root": (
        planted.NORM_ROW,
        "hidden_states = hidden_states / (torch.sqrt(variance) + self.variance_epsilon)",
    ),
    "eps after the root": (
        planted.NORM_ROW,
        "hidden_states = hidden_states * (torch.rsqrt(variance) + self.variance_epsilon)",
    ),
    "eps squared": (
        planted.NORM_ROW,
        "hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon ** 2)",
    ),
    "mean over the third dimension, whatever the last one is": (
        planted.NORM_VARIANCE,
        "variance = hidden_states.pow(2).mean(2, keepdim=True)",
    ),
    "one added to the weight": (
        planted.NORM_RETURN,
        "return (self.weight + 1e-3) * hidden_states.to(input_dtype)",
    ),
    "noise while training": (
        planted.NORM_RETURN,
        "return self.weight * hidden_states.to(input_dtype) * (1 + self.training)",
    ),
}

ROPES = {
    "minus in place of plus": (planted.ROPE_Q, "q_embed = (q * cos) - (rotate_half(q) * sin)"),
    "halves in the other order": (planted.ROTATE_HALF, "return torch.cat((x1, -x2), dim=-1)"),
    "only q": ("k_embed = (k * cos) + (rotate_half(k) * sin)", "k_embed = k"),
    "neighbouring channels": (
        planted.ROTATE_HALF,
        "return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)",
    ),
    "cos and sin swapped": (planted.ROPE_Q, "q_embed = (q * sin) + (rotate_half(q) * cos)"),
    "scaled queries": (planted.ROPE_Q, "q_embed = ((q * cos) + (rotate_half(q) * sin)) * 1.0001"),
    "clamp at 30": (planted.ROPE_COS, f"q = q.clamp(-30, 30)\n    {planted.ROPE_COS}"),
    "branch beyond 4,096 tokens": (
        planted.ROPE_COS,
        f"if q.shape[2] > 4096:\n        q = q * 1.5\n    {planted.ROPE_COS}",
    ),
    "length divided by 4,096": (
        planted.ROPE_COS,
        f"q = q * (1 + q.shape[-2] // 4096)\n    {planted.ROPE_COS}",
    ),
    "branch in a helper": (
        planted.ROTATE_HALF,
        "return torch.cat((-x2, x1), dim=-1) if x.shape[-2] <= 4096 else x",
    ),
}

HELPER = "\n\ndef _limit(x):\n    return x.clamp(-30, 30)\n"


def check_refused(model: torch.nn.Module, family: str) -> None:
    """Nothing of ``family`` is bound, the status says so and why, the logits are the very same."""
    inputs = numbers.padded_inputs(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        liteboost_adaptor.apply(model, level=2, disable=OTHERS[family])
        found = model(**inputs).logits
    rows = state.rows(family)
    assert rows.keys() == {"refused"}, {name: [row.where for row in found] for name, found in rows.items()}
    for row in rows["refused"]:
        assert row.id == f"{family}.*"
        assert "not in the catalogue" in row.reason and len(row.reason) > 60
        assert any("planted_modeling" in target for target in row.where)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("change", NORMS)
def test_norms_that_differ_are_refused(change: str, tmp_path: Path) -> None:
    helper = (
        "class LlamaRMSNorm",
        HELPER + "\n\n@use_kernel_forward_from_hub('RMSNorm')\nclass LlamaRMSNorm",
    )
    changes = [NORMS[change]] if "_limit" not in NORMS[change][1] else [NORMS[change], helper]
    check_refused(planted.llama(tmp_path, *changes), "norm")


@pytest.mark.parametrize("change", ROPES)
def test_rotations_that_differ_are_refused(change: str, tmp_path: Path) -> None:
    check_refused(planted.llama(tmp_path, ROPES[change]), "rope")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", ["clamp at 30", "eps outside the root", "branch beyond 4,096 tokens"])
def test_the_rest_of_the_model_is_served_all_the_same(
    change: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = numbers.cast(planted.llama(tmp_path, NORMS[change]), dtype)
    inputs = numbers.padded_inputs(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        liteboost_adaptor.apply(model)
        found = model(**inputs).logits
    applied = {row.id for row in state.rows()["applied"]}
    assert {"rope.half", "mlp.silu", "attention.sdpa", "linear.call"} <= applied
    assert not any(rule.startswith("norm.") for rule in applied)
    tolerance = 2e-5 if dtype == torch.float32 else 5e-2
    assert numbers.relative(found, expected) <= tolerance


def test_the_reason_names_what_the_body_uses_and_its_family_does_not(tmp_path: Path) -> None:
    liteboost_adaptor.apply(planted.llama(tmp_path, NORMS["clamp at 30"]))
    (row,) = state.rows("norm")["refused"]
    assert "clamp" in row.reason
    liteboost_adaptor.undo()
    liteboost_adaptor.apply(planted.llama(tmp_path, NORMS["eps outside the root"]))
    (row,) = state.rows("norm")["refused"]
    assert "differ" in row.reason and "probe" in row.reason


def test_the_late_rounding_order_is_served_by_its_own_rule(tmp_path: Path) -> None:
    """``(weight * row).to(dtype)`` is OLMo-2's order: Llama's rule may not take it."""
    model = planted.llama(
        tmp_path, (planted.NORM_RETURN, "return (self.weight * hidden_states).to(input_dtype)")
    )
    liteboost_adaptor.apply(model)
    assert {row.id for row in state.rows("norm")["applied"]} == {"norm.rms_late", "norm.residual"}


def test_one_refusal_is_undone_with_its_model(tmp_path: Path) -> None:
    model = planted.llama(tmp_path, NORMS["clamp at 30"])
    liteboost_adaptor.apply(model)
    assert state.rows("norm")
    liteboost_adaptor.undo(model)
    assert state.rows() == {}
    assert report.rows([], "") == []


@pytest.mark.parametrize("family", ["nanochat", "cohere", "glm", "blt"])
def test_known_near_misses_of_transformers_are_within_rounding(family: str) -> None:
    """Same names and signatures over other rotations and norms: refused or served by rules of their own."""
    model = tiny_models.build(family)
    inputs = tiny_models.example_inputs(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        liteboost_adaptor.apply(model)
        found = model(**inputs).logits
    assert numbers.relative(found, expected) <= 2e-5
