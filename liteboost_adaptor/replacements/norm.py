"""RMSNorm and LayerNorm modules, alone and with the residual addition before them.

Forms that few families have are in `norm_forms`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..eligibility import PROBE, AnyModule, class_as_written, observed, unserved, widens
from ..report import CallCounter
from .layout import elementwise

ops = torch.ops.liteboost
_WEIGHT_ERROR = "weight dtype"
_SHAPE_ERROR = "a weight of another shape than a row"
_NO_WEIGHT = "no weight where the original multiplies by one"


def weight_unserved(x: torch.Tensor, weight: torch.Tensor | None) -> str:
    """Why an op cannot scale ``x`` by ``weight``: another shape than a row's, or a dtype that is not served.

    Served are the dtype of ``x`` and fp32. The originals broadcast whatever can be.
    """
    if weight is None:
        return ""
    if weight.shape != x.shape[-1:]:
        return _SHAPE_ERROR
    if weight.dtype not in (x.dtype, torch.float32):
        return f"{_WEIGHT_ERROR} {str(weight.dtype).removeprefix('torch.')}"
    return ""


def widened(x: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor | None:
    """``other`` as fp32 where it `widens`."""
    return other.float() if other is not None and widens(x, other) else other


@dataclass(frozen=True, kw_only=True)
class RmsForm:
    """Where an RMSNorm keeps what it computes with, and in which order it rounds.

    Attributes:
        eps: Attribute.
        weight: Attribute; empty where there never is a weight.
        weighted_if: Attribute that says whether there is a weight; empty where there always is one.
        offset: Added to the weight (1.0 for Gemma).
        offset_rounded: The weight with its offset has the weight's dtype, not fp32.
        late: Multiply by the weight before rounding to the input's dtype, not after.
        weight_dtype_counts: Rounds to the weight's dtype, so serves only where that is the input's (T5).
    """

    eps: str
    weight: str = "weight"
    weighted_if: str = ""
    offset: float = 0.0
    offset_rounded: bool = False
    late: bool = False
    weight_dtype_counts: bool = False

    def scale(self, module: torch.nn.Module) -> torch.Tensor | None:
        """The module's weight, or None where it has none."""
        return getattr(module, self.weight) if self._is_weighted(module) else None

    def _is_weighted(self, module: torch.nn.Module) -> bool:
        return bool(self.weight) and (not self.weighted_if or bool(getattr(module, self.weighted_if)))

    def unserved(
        self, module: torch.nn.Module, x: torch.Tensor, scale: torch.Tensor | None, *others: torch.Tensor
    ) -> str:
        """Why the ops do not serve rows ``x`` (and ``others`` beside them), or an empty string."""
        reason = unserved(x, scale, *others)
        if reason:
            return reason
        if scale is None:
            return _NO_WEIGHT if self._is_weighted(module) else ""
        shape = scale.shape
        if shape != x.shape[-1:] and (len(shape) != 2 or shape != x.shape[-2:]):
            return _SHAPE_ERROR
        if scale.dtype == x.dtype:
            return reason
        # Where a sum is rounded to the weight's dtype, the weight has to keep it.
        keeps = self.weight_dtype_counts or (self.offset and not self.late)
        may_widen = not keeps and widens(x, scale)
        if not may_widen and (self.weight_dtype_counts or scale.dtype != torch.float32):
            reason = f"{_WEIGHT_ERROR} {str(scale.dtype).removeprefix('torch.')}"
        return reason

    def arguments(
        self, module: torch.nn.Module, x: torch.Tensor, scale: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, float, float, bool]:
        """What the ops take after the rows ``x``: weight, eps, weight_offset, late."""
        offset = self.offset
        if scale is not None:
            if self.offset_rounded:
                scale, offset = scale + offset, 0.0
            if scale.dtype is not x.dtype:
                scale = widened(x, scale)
        return scale, getattr(module, self.eps), offset, self.late


def rms_norm(
    original: Callable[..., Any], counter: CallCounter, **parameters: Any
) -> Callable[..., torch.Tensor]:
    """RMSNorm ``forward(self, hidden_states)``; the parameters are those of `RmsForm`."""
    form = RmsForm(**parameters)

    def forward(self: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        scale = form.scale(self)
        reason = form.unserved(self, hidden_states, scale)
        if reason:
            counter.count_fallback(reason)
            return original(self, hidden_states)
        counter.count_served()
        arguments = form.arguments(self, hidden_states, scale)
        if hidden_states.is_contiguous():
            return ops.rms_norm(hidden_states, *arguments)
        fixed = 1 if scale is None else scale.ndim
        return elementwise(ops.rms_norm, hidden_states, *arguments, fixed=fixed)

    return forward


def add_rms_norm(
    original: torch.nn.Module, counter: CallCounter, *, child_rule: str, **parameters: Any
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """``s = a + b; n = norm(s)`` as ``n, s``; the parameters are those of the rule that bound the norm."""
    # The class of a bound norm is a subclass of ours; what users may patch is the class it is based on.
    bound, base = type(original), class_as_written(original)
    base_forward = base.forward
    form = RmsForm(**parameters)

    def fused(norm: torch.nn.Module, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = None
        if type(norm) is not bound or base.forward is not base_forward:
            reason = "the norm was exchanged"
        elif not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
            reason = "a term that is no tensor"
        elif a.shape != b.shape or a.device != b.device or not _are_addable(a, b):
            reason = "terms of different shape, dtype or device"
        else:
            scale, (wide, other) = form.scale(norm), (b, a) if widens(b, a) else (a, b)
            reason = form.unserved(norm, wide, scale, other) or observed(norm)
        if reason:
            counter.count_fallback(reason)
            total = a + b
            return norm(total), total
        counter.count_served()
        if a.dtype != b.dtype:
            a, b = a.float(), b.float()
        arguments = form.arguments(norm, a, scale)
        if a.is_contiguous():
            return ops.add_rms_norm(b, a, *arguments)
        fixed = 1 if scale is None else scale.ndim
        return elementwise(_norm_sum, a, b, *arguments, fixed=fixed)

    return fused


def _are_addable(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether their sum has a dtype of ours: that of both, or fp32 where it promotes one, which is exact."""
    return a.dtype == b.dtype or widens(a, b) or widens(b, a)


def _norm_sum(a: torch.Tensor, b: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.add_rms_norm(b, a, *arguments)


def layer_norm(
    original: Callable[..., Any],
    counter: CallCounter,
    *,
    eps: str | float = "eps",
    weight: str = "weight",
    bias: str = "bias",
    offset: float = 0.0,
    is_elementwise: bool = False,
) -> Callable[..., torch.Tensor]:
    """LayerNorm ``forward(self, hidden_states)`` over the last dimension.

    Args:
        eps: Attribute of the module, or the number itself.
        weight, bias: Attributes of the module; empty where there is none.
        offset: Added to the weight, in the weight's dtype (1.0 for Nemotron).
        is_elementwise: The original is written out, and keeps the layout of its argument (Cohere);
            ``torch.nn.functional.layer_norm`` returns contiguous tensors.
    """

    def forward(self: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        scale = getattr(self, weight) if weight else None
        shift = getattr(self, bias) if bias else None
        reason = (
            unserved(hidden_states, scale, shift)
            or normalized_shape_unserved(self, hidden_states)
            or weight_unserved(hidden_states, scale)
            or weight_unserved(hidden_states, shift)
        )
        if not reason and scale is None and weight and (offset or is_elementwise):
            reason = _NO_WEIGHT
        if not reason and offset and torch._C._is_any_autocast_enabled():
            # Nemotron casts its arguments where CUDA's is on, whatever their device, and computes in a block
            # of its own, whose end may empty autocast's cache.
            reason = "autocast"
        if reason:
            counter.count_fallback(reason)
            return original(self, hidden_states)
        counter.count_served()
        if offset and scale is not None:
            scale = scale + offset
        arguments = scale, shift, getattr(self, eps) if isinstance(eps, str) else eps
        if is_elementwise:
            return elementwise(ops.layer_norm, hidden_states, *arguments, fixed=1)
        return ops.layer_norm(hidden_states, *arguments)

    return forward


def normalized_shape_unserved(module: torch.nn.Module, x: torch.Tensor) -> str:
    """Why the rows of ``x`` are not what ``torch.nn.LayerNorm`` would normalise, if it says what that is."""
    shape = getattr(module, "normalized_shape", None)
    if shape is None or tuple(shape) == x.shape[-1:]:
        return ""
    return "normalised over several dimensions" if len(shape) != 1 else "rows of another size"


def gated_rms_norm(
    original: Callable[..., Any],
    counter: CallCounter,
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
        self: AnyModule, hidden_states: torch.Tensor, gate: torch.Tensor | None = None
    ) -> torch.Tensor:
        act = getattr(self, activation) if activation else "silu"
        reason = gate_unserved(hidden_states, gate, self.weight)
        if not reason and act not in ("silu", "sigmoid"):
            reason = f"activation {act}"
        if reason:
            counter.count_fallback(reason)
            return original(self, hidden_states, gate)
        counter.count_served()
        size = getattr(self, group_size) if group_size else 0
        gate, weight = widened(hidden_states, gate), widened(hidden_states, self.weight)
        arguments = gate, weight, getattr(self, eps), act, gate_first, late, size
        return elementwise(ops.gated_rms_norm, hidden_states, *arguments, fixed=1)

    return forward


def gate_unserved(x: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor | None) -> str:
    """Why a gated norm of ours does not serve a call, or an empty string."""
    if gate is None or weight is None:
        return "no gate" if gate is None else _NO_WEIGHT
    reason = unserved(x, gate, weight)
    if reason:
        return reason
    if gate.shape != x.shape or not (gate.dtype == x.dtype or widens(x, gate)):
        return "a gate of another shape or dtype"
    return weight_unserved(x, widened(x, weight))


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
        other = torch.float32 if dtype != torch.float32 else torch.bfloat16
        mixed = _stand_in(module, other, generator)
        x = torch.randn((3, 5, size), generator=generator, **PROBE)
        name = str(other).removeprefix("torch.")
        yield f"inputs of {size} with {name} weights", mixed, (x.to(dtype),)


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
