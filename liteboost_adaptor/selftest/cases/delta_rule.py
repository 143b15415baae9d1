"""Cases of the gated delta rule: grouped heads, several sequences, prompts of no whole number of chunks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..case import Case, Kind, makes_cases

# batch, tokens, k_heads, v_heads, k_dim, v_dim
STEPS = ((1, 1, 2, 4, 64, 64), (3, 1, 1, 2, 16, 32), (2, 3, 2, 2, 32, 16))
PROMPTS = ((1, 5, 2, 4, 64, 64), (2, 70, 1, 2, 16, 32), (1, 129, 2, 2, 32, 16))


def _inputs(kind: Kind, size: tuple[int, ...], decays: bool = True) -> tuple[dict[str, Tensor], Tensor]:
    """What both ops take, and a state. Decays are within the limits of CANN's operators, -1 <= g <= 0."""
    batch, tokens, k_heads, v_heads, k_dim, v_dim = size
    rate = kind.normal(2, batch, tokens, v_heads).float().sigmoid()
    arguments = {
        "query": kind.normal(batch, tokens, k_heads, k_dim),
        "key": kind.normal(batch, tokens, k_heads, k_dim, scale=k_dim**-0.5),
        "value": kind.normal(batch, tokens, v_heads, v_dim),
        "g": -rate[0] if decays else torch.zeros_like(rate[0]),
        "beta": rate[1].to(kind.dtype),
    }
    return arguments, kind.normal(batch, v_heads, k_dim, v_dim).float()


@makes_cases("recurrent_gated_delta_rule", "", "bf16-state")
def recurrent_gated_delta_rule(kind: Kind) -> Iterator[Case]:
    if "bf16-state" in kind.words:  # rounded at every token, query and key once they are divided
        for size in STEPS:
            arguments, state = _inputs(kind, size)
            turned = state.transpose(2, 3).to(torch.bfloat16).contiguous().transpose(2, 3)
            form = {"state": turned, "scaling": 0.3, "normalize": True}
            yield Case(f"{list(size)} with a state in bf16", arguments | form)
        return
    for size in STEPS:
        arguments, state = _inputs(kind, size)
        yield Case(str(list(size)), {**arguments, "state": state, "scaling": 0.3})
        arguments, state = _inputs(kind, size)
        yield Case(
            f"{list(size)} normalized", {**arguments, "state": state, "scaling": 0.3, "normalize": True}
        )


@makes_cases("chunk_gated_delta_rule")
def chunk_gated_delta_rule(kind: Kind) -> Iterator[Case]:
    for size in PROMPTS:
        arguments, state = _inputs(kind, size)
        yield Case(str(list(size)), {**arguments, "scaling": 0.3})
        arguments, state = _inputs(kind, size)
        form = {"initial_state": state, "scaling": 0.3, "normalize": True}
        yield Case(f"{list(size)} normalized, with a state", {**arguments, **form})
