"""Figures of a plan: bytes of each rank's weights, and what ranks communicate for a token."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from . import quantized
from .plan import ALL_REDUCE_OUTPUT, EMBEDDING, EXPERTS, HEAD, NORM, Role, ShardingPlan, unsharded_plan


def summary(model: nn.Module, plan: ShardingPlan) -> dict[str, Any]:
    """Figures of ``plan`` for ``model``, which may be on the meta device and is not sharded yet.

    Returns:
        ``weights``: bytes on each rank; ``all_weights``: of the whole model; ``repeated``: bytes that
        are replicated; ``exchanges``: role -> modules; ``exchanged``: bytes a rank sends for a token.
    """
    whole = local_nbytes(model, unsharded_plan(plan.model), 0)
    exchanges: dict[Role, int] = {}
    exchanged = 0
    with quantized.as_plain(model):
        for name, role in plan.roles.items():
            exchanges[role] = exchanges.get(role, 0) + 1
            exchanged += sent_nbytes(model, plan, name, role)
    return {
        "weights": [sum(local_nbytes(model, plan, rank).values()) for rank in range(plan.world_size)],
        "all_weights": sum(whole.values()),
        "repeated": sum(nbytes for name, nbytes in whole.items() if name not in plan.shardings),
        "exchanges": exchanges,
        "exchanged": exchanged,
    }


def local_nbytes(model: nn.Module, plan: ShardingPlan, rank: int) -> dict[str, int]:
    """Bytes that ``rank`` holds of each weight of ``model``, by the parameter's name."""
    found = {
        name: math.prod(plan.local_shape(name, tuple(parameter.shape), rank)) * parameter.element_size()
        for name, parameter in model.named_parameters()
        if not (rank and name in plan.rank0_only and parameter.ndim == 1)  # rank 0 has that bias
    }
    for name, weight in quantized.weights_of(model).items():
        found[name] = quantized.nbytes(weight, plan.shardings.get(name), rank, plan.world_size)
    return found


def sent_nbytes(model: nn.Module, plan: ShardingPlan, name: str, role: Role) -> int:
    """Bytes a rank sends in the collective of one module for one token; of the head, the longest shard.

    Quantized weights count as `quantized.as_plain` shows them.
    """
    module = model.get_submodule(name)
    if role == NORM:
        return 4  # a sum of squares in fp32
    if role in (ALL_REDUCE_OUTPUT, EXPERTS):
        weight = getattr(module, "down_proj", None)
        width = weight.shape[2 if getattr(module, "is_transposed", False) else 1]
        return width * weight.element_size()
    weight = module.weight
    if role == HEAD:
        rows = plan.shardings[f"{name}.weight"]
        return (
            max(rows.length(rank, plan.world_size) for rank in range(plan.world_size)) * weight.element_size()
        )
    if role == EMBEDDING:
        return weight.shape[1] * weight.element_size()
    dim = plan.shardings[f"{name}.weight"].dim
    return weight.shape[1 - dim] * weight.element_size()
