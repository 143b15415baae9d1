"""RMSNorm and LayerNorm modules, alone and with the residual addition before them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..report import Tally
from .guards import PROBE, observed, unserved

ops = torch.ops.liteboost
_WEIGHT_ERROR = "weight dtype"


def _weight_unserved(x: torch.Tensor, weight: torch.Tensor | None) -> str:
    if weight is not None and weight.dtype not in (x.dtype, torch.float32):
        return f"{_WEIGHT_ERROR} {str(weight.dtype).removeprefix('torch.')}"
    return ""


def rms_norm(
    original: Callable[..., Any],
    tally: Tally,
    *,
    eps: str,
    weight: str = "weight",
    offset: float = 0.0,
    late: bool = False,
) -> Callable[..., torch.Tensor]:
    """RMSNorm ``forward(self, hidden_states)``.

    Args:
        eps, weight: Attributes of the module; an empty ``weight`` means there is none.
        offset: Added to the weight (1.0 for Gemma).
        late: Multiply by the weight before rounding to the input's dtype, not after.
    """

    def forward(self: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        scale = getattr(self, weight) if weight else None
        reason = unserved(hidden_states, scale) or _weight_unserved(hidden_states, scale)
        if reason:
            tally.fell_back(reason)
            return original(self, hidden_states)
        tally.served()
        return ops.rms_norm(hidden_states, scale, getattr(self, eps), offset, late)

    return forward


def add_rms_norm(
    original: torch.nn.Module,
    tally: Tally,
    *,
    child_rule: str,
    eps: str,
    weight: str = "weight",
    offset: float = 0.0,
    late: bool = False,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """``s = a + b; n = norm(s)`` as ``n, s``; the parameters are those of the rule that bound the norm."""
    # The class of a bound norm is a subclass of ours; what users may patch is the class it is based on.
    bound, base = type(original), type(original).__bases__[0]
    base_forward = base.forward

    def fused(norm: torch.nn.Module, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = getattr(norm, weight, None) if weight else None
        if type(norm) is not bound or base.forward is not base_forward:
            reason = "the norm was exchanged"
        elif not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
            reason = "a term that is no tensor"
        elif a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
            reason = "terms of different shape, dtype or device"
        else:
            reason = unserved(a, b, scale) or _weight_unserved(a, scale) or observed(norm)
        if reason:
            tally.fell_back(reason)
            total = a + b
            return norm(total), total
        tally.served()
        return ops.add_rms_norm(b, a, scale, getattr(norm, eps), offset, late)

    return fused


def layer_norm(
    original: Callable[..., Any], tally: Tally, *, eps: str = "eps", bias: str = "bias", affine: bool = True
) -> Callable[..., torch.Tensor]:
    """LayerNorm ``forward(self, hidden_states)`` over the last dimension.

    Args:
        eps, bias: Attributes of the module; an empty ``bias`` means there is none.
        affine: Whether the module has a weight at all.
    """

    def forward(self: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        scale = self.weight if affine else None
        shift = getattr(self, bias) if bias else None
        reason = (
            unserved(hidden_states, scale, shift)
            or _weight_unserved(hidden_states, scale)
            or _weight_unserved(hidden_states, shift)
        )
        if not reason and len(getattr(self, "normalized_shape", (0,))) != 1:
            reason = "normalised over several dimensions"
        if reason:
            tally.fell_back(reason)
            return original(self, hidden_states)
        tally.served()
        return ops.layer_norm(hidden_states, scale, shift, getattr(self, eps))

    return forward


def gated_rms_norm(
    original: Callable[..., Any],
    tally: Tally,
    *,
    eps: str,
    activation: str = "",
    gate_first: bool = False,
    late: bool = False,
    group_size: str = "",
) -> Callable[..., torch.Tensor]:
    """Gated RMSNorm ``forward(self, hidden_states, gate)``.

    Args:
        eps: Attribute of the module.
        activation: Attribute that holds the name of the gate's activation; empty for silu.
        gate_first, late: See `liteboost_adaptor.ops.norm.gated_rms_norm`.
        group_size: Attribute that holds the number of channels normalised together; empty for all.
    """

    def forward(
        self: torch.nn.Module, hidden_states: torch.Tensor, gate: torch.Tensor | None = None
    ) -> torch.Tensor:
        act = getattr(self, activation) if activation else "silu"
        if gate is None:
            reason = "no gate"
        elif act not in ("silu", "sigmoid"):
            reason = f"activation {act}"
        elif gate.shape != hidden_states.shape or gate.dtype != hidden_states.dtype:
            reason = "a gate of another shape or dtype"
        else:
            reason = unserved(hidden_states, gate, self.weight) or _weight_unserved(
                hidden_states, self.weight
            )
        if reason:
            tally.fell_back(reason)
            return original(self, hidden_states, gate)
        tally.served()
        size = getattr(self, group_size) if group_size else 0
        return ops.gated_rms_norm(
            hidden_states, gate, self.weight, getattr(self, eps), act, gate_first, late, size
        )

    return forward


def norm_cases(
    module: torch.nn.Module, dtype: torch.dtype
) -> Iterator[tuple[str, torch.nn.Module, tuple[Any, ...]]]:
    """Probe cases for a norm ``forward(self, x)``: hard inputs, a copy of ``module``, random weights."""
    generator = torch.Generator("cpu").manual_seed(20)
    stand_in = _stand_in(module, dtype, generator)
    sizes = {p.shape[-1] for p in module._parameters.values() if p is not None} or {7, 64, 4099}
    for size in sorted(sizes):
        for description, x in hard_inputs((3, 5, size), generator):
            yield f"{description} inputs of {size}", stand_in, (x.to(dtype),)
        for shape in ((4, size), (2, 3, 5, size)):
            x = torch.randn(shape, generator=generator, **PROBE)
            yield f"{len(shape)}-D inputs of {size}", stand_in, (x.to(dtype),)
        if dtype != torch.float32:
            mixed = _stand_in(module, torch.float32, generator)
            x = torch.randn((3, 5, size), generator=generator, **PROBE)
            yield f"inputs of {size} with fp32 weights", mixed, (x.to(dtype),)


def gated_norm_cases(
    module: torch.nn.Module, dtype: torch.dtype
) -> Iterator[tuple[str, torch.nn.Module, tuple[Any, ...]]]:
    """Probe cases for a norm ``forward(self, x, gate)``."""
    generator = torch.Generator("cpu").manual_seed(21)
    for description, instance, (x,) in norm_cases(module, dtype):
        yield description, instance, (x, torch.randn(x.shape, generator=generator, **PROBE).to(dtype))


def _stand_in(module: torch.nn.Module, dtype: torch.dtype, generator: torch.Generator) -> torch.nn.Module:
    """A shallow copy of ``module`` with parameters of its own: random, none of them 0 or 1."""
    stand_in = copy.copy(module)
    stand_in._parameters = {
        name: None
        if parameter is None
        else torch.nn.Parameter(
            (torch.randn(parameter.shape, generator=generator, **PROBE) * 0.5 + 0.7).to(dtype), False
        )
        for name, parameter in module._parameters.items()
    }
    return stand_in


def hard_inputs(shape: tuple[int, ...], generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Random fp32 inputs: plain, tiny, huge, with outliers, zero."""
    x = torch.randn(shape, generator=generator, **PROBE)
    outliers = x.clone()
    outliers[..., 0] *= 3000.0
    yield "random", x
    yield "tiny (1e-4)", x * 1e-4
    yield "huge (1e4)", x * 1e4
    yield "outlier", outliers
    yield "zero", torch.zeros(shape, **PROBE)
