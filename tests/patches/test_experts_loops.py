"""Experts that do not ask the registry: families with a loop, or a product over all experts, of their own."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from support import calls, numbers, state, tiny_models
from transformers.activations import ACT2FN
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

import liteboost_adaptor

#: Family -> rule, class whose forward it replaces, attribute of the activation.
LOOPS = {
    "longcat_flash": ("experts.loop_with_identity", "LongcatFlashExperts", "act_fn"),
    "llama4_text": ("experts.masked", "Llama4TextExperts", "act_fn"),
    "jetmoe": ("experts.sorted_rows", "JetMoeParallelExperts", ""),
    "dbrx": ("experts.single", "DbrxExpertGLU", "activation_fn"),
}
DTYPES = [torch.bfloat16, torch.float16]


def parts_of(model: torch.nn.Module, family: str) -> list[torch.nn.Module]:
    return [part for part in model.modules() if type(part).__name__ == LOOPS[family][1]]


def recorded(model: torch.nn.Module, family: str) -> list[tuple[torch.nn.Module, tuple[Any, ...]]]:
    """The parts with the arguments of their calls in a prefill and a step of one token."""
    found: list[tuple[torch.nn.Module, tuple[Any, ...]]] = []
    handles = [
        part.register_forward_pre_hook(lambda part, args: found.append((part, args)))
        for part in parts_of(model, family)
    ]
    with torch.no_grad():
        model(**tiny_models.example_inputs(model, batch=3, length=9))
        model(**tiny_models.example_inputs(model, batch=1, length=1))
    for handle in handles:
        handle.remove()
    return found


def cast(args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    return tuple(
        arg.to(dtype) if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in args
    )


def together(seen: list[tuple[torch.nn.Module, tuple[Any, ...]]]) -> torch.Tensor:
    """All results in one vector of float64."""
    return torch.cat([part(*args).double().flatten() for part, args in seen])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", LOOPS)
@torch.no_grad()
def test_half_precision_is_as_near_to_float64_as_the_original(family: str, dtype: torch.dtype) -> None:
    model = tiny_models.build(family)
    seen = [(part, cast(args, dtype)) for part, args in recorded(model, family)]
    numbers.cast(model, dtype)
    doubled = [(copy.deepcopy(part).double(), cast(args, torch.float64)) for part, args in seen]
    oracle, originals = together(doubled), together(seen)
    liteboost_adaptor.apply(model)
    with calls.served() as served:
        ours = together(seen)
    assert served.rules[LOOPS[family][0]] == len(seen) > 1
    own, distance = ((found - oracle).norm() / oracle.norm() for found in (originals, ours))
    assert distance <= max(1.5 * own, numbers.ULP[dtype]), f"ours {distance:.2e}, original {own:.2e}"


@pytest.mark.parametrize("family", LOOPS)
@torch.no_grad()
def test_what_is_not_served_is_the_originals(family: str) -> None:
    """Gradients, autocast and an activation exchanged since: the very numbers, and the reason counted."""
    rule, _, act = LOOPS[family]
    model = tiny_models.build(family)
    part, args = recorded(model, family)[0]

    def wanting_gradients() -> torch.Tensor:
        with torch.enable_grad():
            return part(*(arg.clone().requires_grad_() if arg is args[0] else arg for arg in args))

    def under_autocast() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return part(*args)

    for call, reason in ((wanting_gradients, "grad mode"), (under_autocast, "autocast")):
        expected = call()
        liteboost_adaptor.apply(model)
        with calls.served() as served:
            assert torch.equal(call(), expected)
        assert served.fallbacks[(rule, reason)] == 1 and served.rules[rule] == 0
        liteboost_adaptor.undo()
    if act:
        liteboost_adaptor.apply(model)
        setattr(part, act, ACT2FN["gelu"])
        with calls.served() as served:
            found = part(*args)
        assert served.fallbacks[(rule, "the activation was exchanged")] == 1
        liteboost_adaptor.undo()
        assert torch.equal(found, part(*args))


@pytest.mark.parametrize("family", [family for family in LOOPS if LOOPS[family][2]])
@torch.no_grad()
def test_another_activation_is_refused(family: str) -> None:
    rule, name, act = LOOPS[family]
    model = tiny_models.build(family)
    for part in parts_of(model, family):
        setattr(part, act, ACT2FN["gelu"])
    expected = numbers.prefill_and_steps(model)
    liteboost_adaptor.apply(model)
    with calls.served() as served:
        assert numbers.relative(numbers.prefill_and_steps(model), expected) <= 2e-5
    assert rule not in served.rules
    assert any(name in where for row in state.rows("experts")["refused"] for where in row.where)


def test_llama4_reads_only_the_experts_used() -> None:
    """An expert to which no token is routed may hold anything."""
    model = tiny_models.build("llama4_text")
    part = parts_of(model, "llama4_text")[0]
    experts, width = part.gate_up_proj.shape[:2]
    x = torch.randn(experts, 5, width)
    x[1] = 0.0
    x[2, ::2] = 0.0
    with torch.no_grad():
        expected = part(x.view(-1, width))
        liteboost_adaptor.apply(model)
        part.gate_up_proj[1], part.down_proj[1] = float("nan"), float("nan")
        found = part(x.view(-1, width))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("limit", [None, 0.5])
@torch.no_grad()
def test_step_experts(limit: float | None) -> None:
    """Step-3.7 is no causal model; its experts have the registry's weights and a gate clamped afterwards."""
    config = types.SimpleNamespace(
        num_local_experts=5, hidden_size=24, moe_intermediate_size=20, hidden_act="silu"
    )
    part = Step3p7Experts(config, limit)
    for parameter in part.parameters():
        parameter.normal_()
    x, scores = torch.randn(7, 24), torch.rand(7, 2)
    index = torch.stack([torch.randperm(5)[:2] for _ in range(7)])
    index[3] = 5  # no expert
    expected = part(x, index, scores)
    liteboost_adaptor.apply(part)
    with calls.served() as served:
        found = part(x, index, scores)
    assert served.rules["experts.loop"] == 1
    assert numbers.relative(found, expected) <= 2e-5
