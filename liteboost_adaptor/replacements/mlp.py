"""Gated activations: ``act(gate) * up`` wherever it stands, and GPT-OSS's clamped form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..eligibility import autocast_dtype, class_as_written, observed, unserved
from ..report import CallCounter
from .layout import elementwise
from .linear import layer_unserved, operands, weight_and_bias

ops = torch.ops.liteboost


def gated_activation(
    original: torch.nn.Module, counter: CallCounter, *, activation: str, alpha: float = 1.0
) -> Callable[..., torch.Tensor]:
    """``act(gate) * up`` in one pass, for the activation module ``original``.

    What it returns has ``of_calls``, see `engine.rewrite`: both linear layers of a gated MLP with it.
    """
    # What users may patch is the class the author wrote, which a bound activation is based on.
    known, base = type(original), class_as_written(original)
    base_forward = base.forward

    def exchanged(act: torch.nn.Module) -> str:
        is_same = type(act) is known and base.forward is base_forward
        return "" if is_same else "the activation was exchanged"

    def fused(act: torch.nn.Module, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        reason = exchanged(act) or _factors_unserved(gate, up) or observed(act)
        if reason:
            counter.count_fallback(reason)
            return act(gate) * up
        counter.count_served()
        if gate.is_contiguous():
            return ops.gated_activation(gate, up, activation, alpha)
        return elementwise(ops.gated_activation, gate, up, activation, alpha, fixed=0)

    def of_calls(
        gate_call: Callable[..., Any], up_call: Callable[..., Any]
    ) -> Callable[..., torch.Tensor] | None:
        """``act(gate(x)) * up(x)`` in one, for two linear layers; None for other calls."""
        if not (hasattr(gate_call, "counter") and hasattr(up_call, "counter")):
            return None

        def gated_linear(
            act: torch.nn.Module, gate: torch.nn.Module, up: torch.nn.Module, x: torch.Tensor
        ) -> torch.Tensor:
            dtype = autocast_dtype(x)
            if exchanged(act) or observed(act) or _layers_unserved(gate, up, x, dtype):
                # One by one; each counts why it is not served, if it is not.
                return fused(act, gate_call(gate, x), up_call(up, x))
            counter.count_served()
            gate_call.counter.count_served()
            up_call.counter.count_served()
            return ops.gated_linear(*operands(x, dtype, gate, up), activation, alpha)

        return gated_linear

    vars(fused)["of_calls"] = of_calls
    return fused


def gated_function(
    original: Callable[[torch.Tensor], torch.Tensor], counter: CallCounter, *, activation: str
) -> Callable[..., torch.Tensor]:
    """``act(gate) * up`` in one pass, for the activation function ``original``, such as ``F.silu``."""

    def fused(
        act: Callable[[torch.Tensor], torch.Tensor], gate: torch.Tensor, up: torch.Tensor
    ) -> torch.Tensor:
        reason = "the activation was exchanged" if act is not original else _factors_unserved(gate, up)
        if reason:
            counter.count_fallback(reason)
            return act(gate) * up
        counter.count_served()
        if gate.is_contiguous():
            return ops.gated_activation(gate, up, activation)
        return elementwise(ops.gated_activation, gate, up, activation, fixed=0)

    return fused


def activation(
    original: Callable[..., Any], counter: CallCounter, *, activation: str, alpha: float = 1.0
) -> Callable[..., torch.Tensor]:
    """An activation module's ``forward(self, input)`` in one pass."""

    def forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        reason = unserved(x)
        if reason:
            counter.count_fallback(reason)
            return original(self, x)
        counter.count_served()
        if x.is_contiguous():
            return ops.activation(x, activation, alpha)
        return elementwise(ops.activation, x, activation, alpha, fixed=0)

    return forward


def _layers_unserved(
    gate: torch.nn.Module, up: torch.nn.Module, x: torch.Tensor, dtype: torch.dtype | None
) -> str:
    reason = layer_unserved(gate, x, dtype) or layer_unserved(up, x, dtype)
    if reason:
        return reason
    first, second = weight_and_bias(gate)[0], weight_and_bias(up)[0]
    return "layers of different shape" if first.shape != second.shape else ""


def _factors_unserved(gate: Any, up: Any) -> str:
    if not (isinstance(gate, torch.Tensor) and isinstance(up, torch.Tensor)):
        return "a factor that is no tensor"
    if gate.shape != up.shape or gate.dtype != up.dtype or not gate.ndim:
        return "factors of different shape or dtype"
    return unserved(gate, up)


def clamped_gate(
    original: Callable[..., Any],
    counter: CallCounter,
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
            counter.count_fallback(reason)
            return original(self, gate_up)
        counter.count_served()
        gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if interleaved else gate_up.chunk(2, dim=-1)
        slope = getattr(self, alpha) if alpha else 1.0
        bound = getattr(self, limit) if limit else None
        return ops.gated_activation(gate, up, "silu", slope, bound, up_offset)

    return apply_gate
