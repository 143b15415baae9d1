"""Mixture of experts: entries of transformers' ``ExpertsInterface``, and modules that do not ask it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..eligibility import AnyModule, autocast, observed, unserved
from ..report import CallCounter

ops = torch.ops.liteboost
REGISTRY = "transformers.integrations.moe:ExpertsInterface"
Experts = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def experts(original: Experts, counter: CallCounter) -> Experts:
    """An entry of the registry. Modules of models that are not bound get the original.

    What stands between the two products is the module's own: ``_apply_gate`` (or ``act_fn``, without a gate)
    and ``post_expert_norm``, to which rules of their own apply.
    """

    def forward(
        self: AnyModule,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        mark = getattr(self, "__liteboost__", None)
        if mark is not None and REGISTRY in mark.registries:
            reason = _unserved(self, hidden_states, top_k_index, top_k_weights)
            if not reason:
                counter.count_served()
                return _run(self, hidden_states, top_k_index, top_k_weights)
            counter.count_fallback(reason)
        return original(self, hidden_states, top_k_index, top_k_weights)

    return forward


def loop(original: Experts, counter: CallCounter) -> Experts:
    """A ``forward`` that goes through the experts one by one, and has the registry's weights and gate."""

    def forward(
        self: AnyModule,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        reason = _unserved(self, hidden_states, top_k_index, top_k_weights)
        if reason:
            counter.count_fallback(reason)
            return original(self, hidden_states, top_k_index, top_k_weights)
        counter.count_served()
        return _run(self, hidden_states, top_k_index, top_k_weights)

    return forward


def loop_with_identity(
    original: Experts, counter: CallCounter, *, routed: str, activation: str, act_types: list[str]
) -> Experts:
    """A loop in which experts without weights hand on what they are given (LongCat-Flash).

    Args:
        routed: Attribute with the number of experts that have weights; they come first.
        activation: What ``act_fn``, one of the classes ``act_types``, computes.
    """

    def forward(
        self: AnyModule,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        reason = _unserved(self, hidden_states, top_k_index, top_k_weights)
        reason = reason or _exchanged(self.act_fn, act_types)
        if reason:
            counter.count_fallback(reason)
            return original(self, hidden_states, top_k_index, top_k_weights)
        counter.count_served()
        count = getattr(self, routed)
        index = top_k_index.clamp(max=count)
        gate, up = ops.experts_linear(hidden_states, self.gate_up_proj[:count], None, index).chunk(2, dim=-1)
        states = ops.gated_activation(gate, up, activation)
        states = ops.experts_linear(states, self.down_proj, None, index)
        is_identity = (index == count).unsqueeze(-1)
        states = torch.where(is_identity, hidden_states.unsqueeze(1), states)
        return ops.experts_combine(states, top_k_weights)

    return forward


def masked(
    original: Callable[..., torch.Tensor], counter: CallCounter, *, activation: str, act_types: list[str]
) -> Callable[..., torch.Tensor]:
    """Each expert has a copy of all tokens, in which those of other experts are zero (Llama-4).

    Without biases a row of zeros stays one, so only the others are computed.

    Args:
        activation: What ``act_fn``, one of the classes ``act_types``, computes.
    """

    def forward(self: AnyModule, hidden_states: torch.Tensor) -> torch.Tensor:
        weights = self.gate_up_proj, self.down_proj
        reason = unserved(hidden_states, *weights) or autocast(hidden_states)
        reason = reason or _exchanged(self.act_fn, act_types)
        if not reason and any(weight.dtype != hidden_states.dtype for weight in weights):
            reason = "weight of another dtype"
        if reason:
            counter.count_fallback(reason)
            return original(self, hidden_states)
        counter.count_served()
        experts, width = weights[0].shape[:2]
        rows = hidden_states.view(experts, -1, width)
        own = torch.arange(experts, device=rows.device).unsqueeze(1)
        index = torch.where((rows != 0).any(dim=-1), own, experts).view(-1, 1)
        gate, up = ops.experts_linear(rows.flatten(0, 1), weights[0].mT, None, index).chunk(2, dim=-1)
        states = ops.gated_activation(gate, up, activation)
        return ops.experts_linear(states, weights[1].mT, None, index).view(-1, self.hidden_size)

    return forward


def sorted_rows(original: Callable[..., torch.Tensor], counter: CallCounter) -> Callable[..., torch.Tensor]:
    """One product for rows in the order of their experts, with the number of rows of each (JetMoE)."""

    def forward(self: AnyModule, inputs: torch.Tensor, expert_size: list[int]) -> torch.Tensor:
        reason = unserved(inputs, self.weight) or autocast(inputs)
        if not reason and self.weight.dtype != inputs.dtype:
            reason = "weight of another dtype"
        if not reason and (not isinstance(expert_size, list) or len(expert_size) != self.num_experts):
            reason = "sizes that are no list"
        if reason:
            counter.count_fallback(reason)
            return original(self, inputs, expert_size)
        counter.count_served()
        sizes = torch.tensor(expert_size, device=inputs.device)
        index = torch.repeat_interleave(torch.arange(self.num_experts, device=inputs.device), sizes)
        return ops.experts_linear(inputs, self.weight, None, index.unsqueeze(1)).squeeze(1)

    return forward


def single(
    original: Callable[..., torch.Tensor], counter: CallCounter, *, activation: str, act_types: list[str]
) -> Callable[..., torch.Tensor]:
    """One expert whose weights are handed in: gate, up, and down transposed (DBRX).

    Args:
        activation: What ``activation_fn``, one of the classes ``act_types``, computes.
    """

    def forward(
        self: AnyModule,
        x: torch.Tensor,
        expert_w1: torch.Tensor,
        expert_v1: torch.Tensor,
        expert_w2: torch.Tensor,
    ) -> torch.Tensor:
        weights = expert_w1, expert_v1, expert_w2
        reason = unserved(x, *weights) or autocast(x) or _exchanged(self.activation_fn, act_types)
        if not reason and any(weight.dtype != x.dtype or weight.ndim != 2 for weight in weights):
            reason = "weight of another dtype or rank"
        if not reason and x.ndim != 2:
            reason = "a shape that is not served"
        if reason:
            counter.count_fallback(reason)
            return original(self, x, expert_w1, expert_v1, expert_w2)
        counter.count_served()
        states = ops.gated_activation(ops.linear(x, expert_w1), ops.linear(x, expert_v1), activation)
        first = torch.zeros(x.shape[0], 1, dtype=torch.int64, device=x.device)
        return ops.experts_linear(states, expert_w2.mT.unsqueeze(0), None, first).squeeze(1)

    return forward


def _exchanged(act: torch.nn.Module, act_types: list[str]) -> str:
    """Why an activation cannot be taken for the one that was there when the module was bound."""
    cls = type(act)
    if f"{cls.__module__}:{cls.__qualname__}" not in act_types:
        return "the activation was exchanged"
    return observed(act)


def _run(
    module: AnyModule, hidden_states: torch.Tensor, index: torch.Tensor, scores: torch.Tensor
) -> torch.Tensor:
    states = _product(module, _up(module), hidden_states, index).flatten(0, 1)
    states = module._apply_gate(states) if _flag(module, "has_gate") else module.act_fn(states)
    states = states.to(hidden_states.dtype).unflatten(0, index.shape)
    states = _product(module, "down_proj", states, index)
    if _flag(module, "has_post_expert_norm"):
        states = module.post_expert_norm(states.flatten(0, 1)).unflatten(0, index.shape)
    if scores.dtype != states.dtype:  # a norm with fp32 weights widens 16-bit states
        scores = scores.float()
    return ops.experts_combine(states, scores).to(hidden_states.dtype)


def _product(module: torch.nn.Module, name: str, states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    weight = getattr(module, name)
    bias = getattr(module, f"{name}_bias") if _flag(module, "has_bias") else None
    if _is_quantized(weight):
        return weight.product(states, bias, index)
    return ops.experts_linear(states, weight.mT if _flag(module, "is_transposed") else weight, bias, index)


def _is_quantized(weight: object) -> bool:
    """Whether integers stand in a weight's place (`quantization.layers.experts.QuantizedExperts`)."""
    return getattr(weight, "holds_integers", False)


def weights_of(module: AnyModule) -> dict[str, bool]:
    """The parameters of experts of the registry's form that hold their weights, and whether transposed.

    Empty for other modules. transformers' decorator notes on the module what its form is.
    """
    if not all(hasattr(module, flag) for flag in ("has_gate", "has_bias", "is_transposed")):
        return {}
    return dict.fromkeys((_up(module), "down_proj"), module.is_transposed)


def _flag(module: torch.nn.Module, name: str) -> bool:
    """What the decorator noted on the module; of versions that knew no such flag, what they all did."""
    return getattr(module, name, name == "has_gate")


def _up(module: torch.nn.Module) -> str:
    return "gate_up_proj" if _flag(module, "has_gate") else "up_proj"


def _unserved(
    module: torch.nn.Module, hidden_states: torch.Tensor, index: torch.Tensor, scores: torch.Tensor
) -> str:
    names = [_up(module), "down_proj"]
    names += [f"{name}_bias" for name in names] if _flag(module, "has_bias") else []
    given: list[Any] = [getattr(module, name, None) for name in names]
    for name, each in zip(names, given, strict=True):
        if not isinstance(each, torch.Tensor) and not _is_quantized(each):
            return f"{name} is no tensor"
    # Integers have a dtype of their own; where they lie is asked of their buffers.
    weights = [each for each in given if not _is_quantized(each)]
    integers = [each.weight for each in given if _is_quantized(each)]
    reason = unserved(hidden_states, index, scores, *weights, *integers) or autocast(hidden_states)
    if reason:
        return reason
    if any(weight.dtype != hidden_states.dtype for weight in weights):
        return "weight of another dtype"
    if index.dtype != torch.int64 or scores.dtype not in (hidden_states.dtype, torch.float32):
        return "routing of a dtype that is not served"
    if hidden_states.ndim != 2 or index.ndim != 2 or index.shape != scores.shape:
        return "a shape that is not served"
    if any(each.shape[0] != getattr(module, "num_experts", each.shape[0]) for each in given):
        return "weights of another number of experts"
    return ""
