"""Mixture of experts, as transformers' ``ExpertsInterface`` calls it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..report import Tally
from .guards import autocast, unserved

ops = torch.ops.liteboost
REGISTRY = "transformers.integrations.moe:ExpertsInterface"
Experts = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def experts(original: Experts, tally: Tally) -> Experts:
    """An entry of the registry. Modules of models that are not bound get the original.

    What stands between the two products is the module's own: ``_apply_gate`` (or ``act_fn``, without a gate)
    and ``post_expert_norm``, to which rules of their own apply.
    """

    def forward(
        self: torch.nn.Module,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        mark = getattr(self, "__liteboost__", None)
        if mark is not None and REGISTRY in mark.registries:
            reason = _unserved(self, hidden_states, top_k_index, top_k_weights)
            if not reason:
                tally.served()
                return _run(self, hidden_states, top_k_index, top_k_weights)
            tally.fell_back(reason)
        return original(self, hidden_states, top_k_index, top_k_weights)

    return forward


def _run(
    module: torch.nn.Module, hidden_states: torch.Tensor, index: torch.Tensor, scores: torch.Tensor
) -> torch.Tensor:
    states = _product(module, _up(module), hidden_states, index).flatten(0, 1)
    states = module._apply_gate(states) if _flag(module, "has_gate") else module.act_fn(states)
    states = states.to(hidden_states.dtype).unflatten(0, index.shape)
    states = _product(module, "down_proj", states, index)
    if _flag(module, "has_post_expert_norm"):
        states = module.post_expert_norm(states.flatten(0, 1)).unflatten(0, index.shape)
    return ops.experts_combine(states, scores).to(hidden_states.dtype)


def _product(module: torch.nn.Module, name: str, states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    weight = getattr(module, name)
    bias = getattr(module, f"{name}_bias") if _flag(module, "has_bias") else None
    return ops.experts_linear(states, weight.mT if _flag(module, "is_transposed") else weight, bias, index)


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
    weights = [getattr(module, name, None) for name in names]
    for name, weight in zip(names, weights, strict=True):
        if not isinstance(weight, torch.Tensor):
            return f"{name} is no tensor"
    reason = unserved(hidden_states, index, scores, *weights) or autocast(hidden_states)
    if reason:
        return reason
    if any(weight.dtype != hidden_states.dtype for weight in weights):
        return "weight of another dtype"
    if index.dtype != torch.int64 or scores.dtype not in (hidden_states.dtype, torch.float32):
        return "routing of a dtype that is not served"
    if hidden_states.ndim != 2 or index.ndim != 2 or index.shape != scores.shape:
        return "a shape that is not served"
    if any(weight.shape[0] != getattr(module, "num_experts", weight.shape[0]) for weight in weights):
        return "weights of another number of experts"
    return ""
