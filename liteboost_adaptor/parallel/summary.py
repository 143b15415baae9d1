"""What a plan comes to: bytes a rank holds, and what ranks exchange for a token."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from . import plan
from .plan import Plan


def summary(model: nn.Module, how: Plan) -> dict[str, Any]:
    """Figures of ``how`` for ``model``, which may be on the meta device and is not divided yet.

    Returns:
        ``weights``: bytes on each rank; ``all_weights``: of the whole model; ``repeated``: bytes of what
        every rank holds whole; ``exchanges``: role -> modules; ``exchanged``: bytes a rank brings a token.
    """
    held, repeated, total = [0] * how.world_size, 0, 0
    for name, parameter in model.named_parameters():
        total += parameter.nbytes
        if name not in how.cuts:
            repeated += parameter.nbytes
        for rank in range(how.world_size):
            shape = how.shape(name, tuple(parameter.shape), rank)
            held[rank] += math.prod(shape) * parameter.element_size()
    exchanges: dict[str, int] = {}
    exchanged = 0
    for name, role in how.roles.items():
        exchanges[role] = exchanges.get(role, 0) + 1
        exchanged += brought(model, how, name, role)
    return {
        "weights": held,
        "all_weights": total,
        "repeated": repeated,
        "exchanges": exchanges,
        "exchanged": exchanged,
    }


def brought(model: nn.Module, how: Plan, name: str, role: str) -> int:
    """Bytes a rank brings to the exchange of one module for one token; of the head, the longest part."""
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
