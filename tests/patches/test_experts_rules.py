"""Mixture of experts through the registry: every family, both entries, and what falls back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import calls, numbers, state, tiny_models
from torch.nn.utils import parametrize
from transformers.integrations import moe
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import liteboost_adaptor

#: Families whose experts ask the registry, by what is particular about them.
FAMILIES = {
    "mixtral": "plain",
    "qwen3_moe": "more experts",
    "gpt_oss": "transposed, interleaved, biases, clamped gate",
    "aria_text": "transposed",
    "nemotron_h": "no gate",
    "deepseek_v4": "clamped before the activation",
    "hy_v4": "clamped gate with torch's silu",
    "minimax_m3_vl_text": "clamped gate with a slope, halves",
    "inkling2_text": "an activation of two tensors",
    "lfm2_moe": "the activation is a function",
    "beam": "gate in fp32",
    "gemma4_text": "tanh-approximated gelu",
}
OTHERS = (
    "afmoe axk1 axk2 bailing_hybrid cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 dots1 dots3_note "
    "dots3_note_text ernie4_5_moe exaone_moe flex_olmo flint glm4_moe glm4_moe_lite glm_moe_dsa granitemoe "
    "granitemoe_swa granitemoehybrid granitemoeshared hunyuan_v1_moe hy_v3 inkling2_loop_text inkling_text "
    "jamba kimi_linear kolibri1 laguna lara_mini mellum mimo_v2_flash minimax minimax_m2 olmoe phimoe "
    "qwen2_moe qwen3_5_moe qwen3_5_moe_text qwen3_next qwen4_exp qwen4_exp_text sarvam_mla sarvam_moe "
    "solar_open zaya"
).split()
ALL = [*FAMILIES, *(pytest.param(family, marks=pytest.mark.full) for family in OTHERS)]
ENTRIES = {"grouped_mm": moe.grouped_mm_experts_forward, "batched_mm": moe.batched_mm_experts_forward}
CODES = {calls.code_of(function): "experts" for function in ENTRIES.values()}


def experts_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [part for part in model.modules() if hasattr(part, "_is_expert_parallel")]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "nemotron_h"])
def test_batched_mm(family: str) -> None:
    """fp32 logits within rounding; originals never called, ours as often as an unpatched model calls them.

    What nobody asks for by name, ``grouped_mm``, is seen at every family in tests/models.
    """
    model = tiny_models.build(family, experts_implementation="batched_mm")
    expected, before = calls.count(CODES, lambda: numbers.prefill_and_steps(model))
    liteboost_adaptor.apply(model)
    with calls.served() as served:
        found, after = calls.count(CODES, lambda: numbers.prefill_and_steps(model))
    assert numbers.relative(found, expected) <= 2e-5
    assert before["experts"] == served.rules["experts.batched_mm"] > 0
    assert after == {}
    assert not [why for (rule, why) in served.fallbacks if rule.startswith("experts.")]
    assert "refused" not in state.rows("experts")


@pytest.mark.full
def test_the_list_of_families_is_complete() -> None:
    """A family new in transformers, or gone, must be noticed."""
    found = set()
    for family in tiny_models.families():
        try:
            model = tiny_models.build(family)
        except (ImportError, ValueError):  # what transformers cannot build here
            continue
        if experts_of(model):
            found.add(family)
    assert found == {*FAMILIES, *OTHERS}


def recorded(model: torch.nn.Module) -> list[tuple[torch.nn.Module, tuple[Any, ...]]]:
    """The experts of a model with the arguments of their calls in a prefill and a step of one token."""
    found: list[tuple[torch.nn.Module, tuple[Any, ...]]] = []
    handles = [
        part.register_forward_pre_hook(lambda part, args: found.append((part, args)))
        for part in experts_of(model)
    ]
    with torch.no_grad():
        model(**tiny_models.example_inputs(model, batch=3, length=9))
        model(**tiny_models.example_inputs(model, batch=1, length=1))
    for handle in handles:
        handle.remove()
    return found


def exact(part: torch.nn.Module, args: tuple[Any, ...]) -> torch.Tensor:
    """What the experts' own loop makes of the same weights and routing in float64."""
    twin = copy.deepcopy(part).double()
    twin.config._experts_implementation = "eager"
    return twin(*(arg.double() if arg.is_floating_point() else arg for arg in args))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ALL)
def test_half_precision_is_as_near_to_float64_as_the_original(family: str, dtype: torch.dtype) -> None:
    """A layer at a time, with the routing of the fp32 model: another expert would be another function."""
    model = tiny_models.build(family)
    # Routers give scores in the dtype of the model or in fp32.
    seen = [
        (part, (x.to(dtype), index, scores.to(scores_dtype)))
        for part, (x, index, scores) in recorded(model)
        for scores_dtype in (dtype, torch.float32)
    ]
    assert len(seen) >= 4
    numbers.cast(model, dtype)
    with torch.no_grad():
        wanted = [exact(part, args) for part, args in seen]
        originals = [part(*args) for part, args in seen]
        liteboost_adaptor.apply(model)
        with calls.served() as served:
            ours = [part(*args) for part, args in seen]
    assert served.rules["experts.grouped_mm"] == len(seen)
    oracle = torch.cat(wanted)
    own = ((torch.cat(originals).double() - oracle).norm() / oracle.norm()).item()
    distance = ((torch.cat(ours).double() - oracle).norm() / oracle.norm()).item()
    assert distance <= max(1.5 * own, numbers.ULP[dtype]), f"ours {distance:.2e}, original {own:.2e}"


def post_normed() -> torch.nn.Module:
    """Experts with a norm behind each (Muse-Spark, no causal model), as the decorator makes them."""

    @moe.use_experts_implementation(has_post_expert_norm=True)
    class NormedExperts(torch.nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts = config.num_local_experts
            self.gate_up_proj = torch.nn.Parameter(torch.randn(self.num_experts, 32, 16))
            self.down_proj = torch.nn.Parameter(torch.randn(self.num_experts, 16, 16))
            self.act_fn = torch.nn.SiLU()
            self.post_expert_norm = torch.nn.RMSNorm(16)

        def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
            raise NotImplementedError

    config = tiny_models.tiny_config("mixtral")
    config._experts_implementation = "grouped_mm"
    return NormedExperts(config)


def routed(part: torch.nn.Module, tokens: int = 6, slots: int = 2, width: int = 0) -> tuple[Any, ...]:
    experts = part.num_experts
    index = torch.stack([torch.randperm(experts)[:slots] for _ in range(tokens)])
    width = width or part.down_proj.shape[2 if getattr(part, "is_transposed", False) else 1]
    return torch.randn(tokens, width), index, torch.rand(tokens, slots)


def test_a_norm_behind_the_experts() -> None:
    part = post_normed()
    args = routed(part)
    with torch.no_grad():
        expected = part(*args)
        liteboost_adaptor.apply(part)
        with calls.served() as served:
            found = part(*args)
    torch.testing.assert_close(found, expected)
    assert served.rules["experts.grouped_mm"] == 1


def test_a_norm_behind_the_experts_that_returns_another_dtype() -> None:
    part = post_normed().bfloat16()
    part.post_expert_norm = LlamaRMSNorm(16)  # fp32 weights: bf16 states become fp32
    states, index, scores = routed(part)
    args = states.bfloat16(), index, scores.bfloat16()
    with torch.no_grad():
        expected = part(*args)
        liteboost_adaptor.apply(part)
        with calls.served() as served:
            found = part(*args)
    assert found.dtype == expected.dtype and numbers.relative(found, expected) <= 0.01
    assert served.rules["experts.grouped_mm"] == 1


def layer(family: str = "mixtral") -> tuple[torch.nn.Module, torch.nn.Module]:
    """A model and the experts of its first layer that has any."""
    model = tiny_models.build(family)
    return model, experts_of(model)[0]


def check_handed_back(
    part: torch.nn.Module, args: tuple[Any, ...], reason: str, call: Callable[[], Any] | None = None
) -> None:
    """The original's very numbers, and the reason counted."""
    call = call or (lambda: part(*args))
    expected = call()
    liteboost_adaptor.apply(part)
    with calls.served() as served:
        found = call()
    assert torch.equal(found, expected)
    assert served.fallbacks[("experts.grouped_mm", reason)] == 1
    assert served.rules["experts.grouped_mm"] == 0


def test_gradients_take_the_original() -> None:
    _, part = layer()
    check_handed_back(part, routed(part), "grad mode")
    part(*routed(part)).sum().backward()
    assert part.gate_up_proj.grad.abs().sum() > 0


@torch.no_grad()
def test_routing_that_wants_gradients_takes_the_original() -> None:
    _, part = layer()
    part.requires_grad_(False)
    x, index, scores = routed(part)
    scores.requires_grad_()
    with torch.enable_grad():
        check_handed_back(part, (x, index, scores), "grad mode")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x, index, scores: (x, index, scores.half()), "routing of a dtype that is not served"),
        (lambda x, index, scores: (x, index.int(), scores), "routing of a dtype that is not served"),
        (lambda x, index, scores: (x.bfloat16(), index, scores), "weight of another dtype"),
    ],
    ids=["half scores", "int32 index", "bf16 states"],
)
@torch.no_grad()
def test_calls_that_are_not_served(change: Callable[..., tuple[Any, ...]], reason: str) -> None:
    _, part = layer()
    check_handed_back(part, change(*routed(part)), reason)


@torch.no_grad()
def test_autocast_takes_the_original() -> None:
    _, part = layer()
    args = routed(part)

    def under_autocast() -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return part(*args)

    check_handed_back(part, args, "autocast", under_autocast)


@torch.no_grad()
def test_eager_experts_are_what_was_asked_for() -> None:
    model = tiny_models.build("mixtral", experts_implementation="eager")
    expected = numbers.prefill_and_steps(model)
    liteboost_adaptor.apply(model)
    with calls.served() as served:
        assert numbers.relative(numbers.prefill_and_steps(model), expected) <= 2e-5
    assert not any(rule.startswith("experts.") for rule in served.rules)
    assert served.rules["mlp.silu"] > 0


@torch.no_grad()
def test_other_models_and_undone_ones_keep_the_original() -> None:
    model, part = layer()
    _, other_part = layer()
    args = routed(part)
    liteboost_adaptor.apply(model)
    assert moe.ExpertsInterface._global_mapping["grouped_mm"] is not ENTRIES["grouped_mm"]
    with calls.served() as served:
        _, count = calls.count(CODES, lambda: (part(*args), other_part(*args)))
    assert served.rules["experts.grouped_mm"] == 1 and count["experts"] == 1
    liteboost_adaptor.undo()
    assert all(moe.ExpertsInterface._global_mapping[name] is ENTRIES[name] for name in ENTRIES)
    _, count = calls.count(CODES, lambda: part(*args))
    assert count["experts"] == 1


@torch.no_grad()
def test_rules_are_turned_off_for_one_model() -> None:
    model, part = layer()
    other, other_part = layer()
    args = routed(part)
    liteboost_adaptor.apply(other)
    liteboost_adaptor.apply(model, disable="experts.*")
    with calls.served() as served:
        part(*args)
    assert served.rules["experts.grouped_mm"] == 0
    with calls.served() as served:
        other_part(*args)
    assert served.rules["experts.grouped_mm"] == 1


@torch.no_grad()
def test_an_entry_of_somebody_else_is_left() -> None:
    def theirs(module: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        return hidden_states * 2

    model, part = layer()
    args = routed(part)
    moe.ExpertsInterface.register("grouped_mm", theirs)
    try:
        liteboost_adaptor.apply(model)
        assert torch.equal(part(*args), args[0] * 2)
        assert "experts.grouped_mm" in {row.id for row in state.rows("experts")["foreign"]}
    finally:
        liteboost_adaptor.undo()
        moe.ExpertsInterface.register("grouped_mm", ENTRIES["grouped_mm"])


@torch.no_grad()
def test_a_gate_patched_on_the_class_later_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, part = layer()
    args = routed(part)
    liteboost_adaptor.apply(model)
    before = part(*args)
    monkeypatch.setattr(MixtralExperts, "_apply_gate", lambda self, states: states.chunk(2, dim=-1)[0])
    assert not torch.allclose(part(*args), before)
    liteboost_adaptor.undo()
    expected = part(*args)
    liteboost_adaptor.apply(model)
    torch.testing.assert_close(part(*args), expected)


@torch.no_grad()
def test_a_parametrized_weight_is_the_one_that_counts() -> None:
    """As adapters of expert weights do it."""

    class Doubled(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    _, part = layer()
    args = routed(part)
    liteboost_adaptor.apply(part)
    parametrize.register_parametrization(part, "down_proj", Doubled())
    with calls.served() as served:
        found = part(*args)
    assert served.rules["experts.grouped_mm"] == 1
    parametrize.remove_parametrizations(part, "down_proj", leave_parametrized=False)
    torch.testing.assert_close(found, 2 * part(*args))


@torch.no_grad()
def test_slots_of_other_processes() -> None:
    """Expert parallelism: an index of ``num_experts`` with weight 0."""
    model, part = layer("gpt_oss")
    x, index, scores = routed(part)
    part._is_expert_parallel = True
    index[::2, 0], scores[::2, 0] = part.num_experts, 0.0
    index[1], scores[1] = part.num_experts, 0.0
    expected = part(x, index, scores)
    liteboost_adaptor.apply(model)
    with calls.served() as served:
        found = part(x, index, scores)
    assert served.rules["experts.grouped_mm"] == 1
    torch.testing.assert_close(found, expected)
    assert (found[1] == 0).all()


@torch.no_grad()
def test_an_expert_that_does_not_exist_is_an_error() -> None:
    _, part = layer()
    x, index, scores = routed(part)
    index[0, 0] = part.num_experts + 1
    liteboost_adaptor.apply(part)
    with pytest.raises(IndexError, match="liteboost::experts_linear: index must be"):
        part(x, index, scores)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_one_graph_without_a_break(family: str) -> None:
    torch.compiler.reset()
    model = tiny_models.build(family)
    inputs = tiny_models.example_inputs(model)
    graphs = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    with torch.no_grad():
        expected = model(**inputs, use_cache=False).logits
        liteboost_adaptor.apply(model)
        found = torch.compile(model, backend=keep, fullgraph=True)(**inputs, use_cache=False).logits
    assert numbers.relative(found, expected) <= 2e-5
    assert len(graphs) == 1
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    layers = len(experts_of(model))
    assert sum(target.startswith("liteboost.experts_linear") for target in targets) == 2 * layers
    assert sum(target.startswith("liteboost.experts_combine") for target in targets) == layers
    assert not any("grouped_mm" in target for target in targets)
    torch.compiler.reset()
