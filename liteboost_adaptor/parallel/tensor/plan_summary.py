"""What a plan comes to: bytes a rank holds, and what ranks exchange for a token."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from . import plan, quantized
from .plan import Plan, undivided


def summary(model: nn.Module, how: Plan) -> dict[str, Any]:
    """Figures of ``how`` for ``model``, which may be on the meta device and is not divided yet.

    Returns:
        ``weights``: bytes on each rank; ``all_weights``: of the whole model; ``repeated``: bytes of what
        every rank holds whole; ``exchanges``: role -> modules; ``exchanged``: bytes a rank brings a token.
    """
    whole = held(model, undivided(how.model), 0)
    exchanges: dict[str, int] = {}
    exchanged = 0
    with quantized.as_plain(model):
        for name, role in how.roles.items():
            exchanges[role] = exchanges.get(role, 0) + 1
            exchanged += brought(model, how, name, role)
    return {
        "weights": [sum(held(model, how, rank).values()) for rank in range(how.world_size)],
        "all_weights": sum(whole.values()),
        "repeated": sum(nbytes for name, nbytes in whole.items() if name not in how.cuts),
        "exchanges": exchanges,
        "exchanged": exchanged,
    }


def held(model: nn.Module, how: Plan, rank: int) -> dict[str, int]:
    """Bytes that ``rank`` holds of each weight of ``model``, integers included, by the parameter's name."""
    found = {
        name: math.prod(how.shape(name, tuple(parameter.shape), rank)) * parameter.element_size()
        for name, parameter in model.named_parameters()
        if not (rank and name in how.once and parameter.ndim == 1)  # rank 0 has that bias
    }
    for name, weight in quantized.weights_of(model).items():
        found[name] = quantized.nbytes(weight, how.cuts.get(name), rank, how.world_size)
    return found


def brought(model: nn.Module, how: Plan, name: str, role: str) -> int:
    """Bytes a rank brings to the exchange of one module for one token; of the head, the longest part.

    Of integers as `quantized.as_plain` shows them.
    """
    module = model.get_submodule(name)
    if role == plan.NORM:
        return 4  # a sum of squares in fp32
    if role in (plan.SUM_OUTPUT, plan.EXPERTS):
        weight = getattr(module, "down_proj", None)
        width = weight.shape[2 if getattr(module, "is_transposed", False) else 1]
        return width * weight.element_size()
    weight = module.weight
    if role == plan.HEAD:
        rows = how.cuts[f"{name}.weight"]
        return (
            max(rows.length(rank, how.world_size) for rank in range(how.world_size)) * weight.element_size()
        )
    if role == plan.EMBEDDING:
        return weight.shape[1] * weight.element_size()
    dim = how.cuts[f"{name}.weight"].dim
    return weight.shape[1 - dim] * weight.element_size()
