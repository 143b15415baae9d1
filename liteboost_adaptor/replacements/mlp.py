"""Gated activations: ``act(gate) * up`` wherever it stands, and GPT-OSS's clamped form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..report import Tally
from .guards import observed, unserved

ops = torch.ops.liteboost


def gated_activation(
    original: torch.nn.Module, tally: Tally, *, activation: str, alpha: float = 1.0
) -> Callable[..., torch.Tensor]:
    """``act(gate) * up`` in one pass, for the activation module ``original``."""
    known, known_forward = type(original), type(original).forward

    def fused(act: torch.nn.Module, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if type(act) is not known or known.forward is not known_forward:
            reason = "the activation was exchanged"
        elif not (isinstance(gate, torch.Tensor) and isinstance(up, torch.Tensor)):
            reason = "a factor that is no tensor"
        elif gate.shape != up.shape or gate.dtype != up.dtype:
            reason = "factors of different shape or dtype"
        else:
            reason = unserved(gate, up) or observed(act)
        if reason:
            tally.fell_back(reason)
            return act(gate) * up
        tally.served()
        return ops.gated_activation(gate, up, activation, alpha)

    return fused


def clamped_gate(
    original: Callable[..., Any],
    tally: Tally,
    *,
    alpha: str = "",
    limit: str = "",
    up_offset: float = 0.0,
    interleaved: bool = True,
) -> Callable[..., torch.Tensor]:
    """``_apply_gate(self, gate_up)`` of experts: silu of the gate times up, both clamped.

    Args:
        alpha, limit: Attributes of the module; empty for 1 and for no limit.
        up_offset: Added to up after clamping.
        interleaved: Even channels gate and odd ones up, in place of the two halves.
    """

    def apply_gate(self: torch.nn.Module, gate_up: torch.Tensor) -> torch.Tensor:
        reason = unserved(gate_up)
        if reason:
            tally.fell_back(reason)
            return original(self, gate_up)
        tally.served()
        gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if interleaved else gate_up.chunk(2, dim=-1)
        slope = getattr(self, alpha) if alpha else 1.0
        bound = getattr(self, limit) if limit else None
        return ops.gated_activation(gate, up, "silu", slope, bound, up_offset)

    return apply_gate
