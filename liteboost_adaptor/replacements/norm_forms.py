"""Norms of few families: in groups of channels, without a product, with steps of their own around the op."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..eligibility import PROBE, AnyModule, unserved
from ..report import CallCounter
from .layout import elementwise
from .norm import gate_unserved, normalized_shape_unserved, weight_unserved, widened

ops = torch.ops.liteboost
_LAYER_NORM_FORWARD = torch.nn.LayerNorm.forward


def torch_rms_norm(original: Callable[..., Any], counter: CallCounter) -> Callable[..., torch.Tensor]:
    """``torch.nn.RMSNorm`` over the last dimension; weight and epsilon may be None."""
    rounds_once = _torch_rounds_once()

    def forward(self: AnyModule, x: torch.Tensor) -> torch.Tensor:
        reason = (
            unserved(x, self.weight) or normalized_shape_unserved(self, x) or weight_unserved(x, self.weight)
        )
        if not reason and x.dtype != torch.float32 and not rounds_once:
            reason = "another rounding order in this torch"
        if reason:
            counter.count_fallback(reason)
            return original(self, x)
        counter.count_served()
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        return ops.rms_norm(x, self.weight, eps, 0.0, True)

    return forward


@functools.cache
def _torch_rounds_once() -> bool:
    """Whether torch's RMSNorm rounds after the weight, with fp32's epsilon; early versions did neither."""
    generator = torch.Generator("cpu").manual_seed(22)
    x, weight = (torch.randn(2, 64, generator=generator, **PROBE) * 1e-3).bfloat16()
    wide = x.float()
    once = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps)
    found = torch.nn.functional.rms_norm(x, (64,), weight)
    return bool((found == (once * weight.float()).bfloat16()).float().mean() > 0.95)


def grouped_rms_norm(
    original: Callable[..., Any],
    counter: CallCounter,
    *,
    eps: str,
    group_size: str,
    offset: float,
    late: bool,
) -> Callable[..., torch.Tensor]:
    """RMSNorm over groups of neighbouring channels, each with weights of its own.

    Args:
        eps: Attribute of the module.
        group_size: Attribute that holds the number of channels of a group; None there means all.
        offset, late: See `liteboost_adaptor.replacements.norm.RmsForm`.
    """

    def forward(self: AnyModule, x: torch.Tensor) -> torch.Tensor:
        weight, size = self.weight, getattr(self, group_size)
        reason = unserved(x, weight)
        if not reason and size is not None and x.shape[-1:] != weight.shape:
            reason = "rows of another size"
        reason = reason or weight_unserved(x, weight)
        if reason:
            counter.count_fallback(reason)
            return original(self, x)
        counter.count_served()
        if size is None:
            return elementwise(ops.rms_norm, x, weight, getattr(self, eps), offset, late, fixed=1)
        groups = (weight.shape[0] // size, size)
        arguments = weight.view(groups), getattr(self, eps), offset, late
        return elementwise(ops.rms_norm, x.unflatten(-1, groups), *arguments, fixed=2).flatten(-2)

    return forward


def l2_norm(original: Callable[..., Any], counter: CallCounter, *, eps: str) -> Callable[..., torch.Tensor]:
    """Rows of Euclidean length one, rounded once: an RMSNorm of n channels whose weights are all 1/sqrt(n).

    Args:
        eps: Attribute of the module; added to the sum of squares, so that their mean gets an n-th of it.
    """

    def forward(self: AnyModule, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1] if x.ndim else 0
        reason = unserved(x) or ("" if size else "an empty row")
        if reason:
            counter.count_fallback(reason)
            return original(self, x)
        counter.count_served()
        scale = torch.full((size,), size**-0.5, dtype=torch.float32, device=x.device)
        return elementwise(ops.rms_norm, x, scale, getattr(self, eps) / size, 0.0, True, fixed=1)

    return forward


def inverse_rms(
    original: Callable[..., Any], counter: CallCounter, *, eps: str, scales: bool
) -> Callable[..., torch.Tensor]:
    """One over the root mean square of each row, rounded; with ``scales`` the row times that."""

    def forward(self: AnyModule, x: torch.Tensor) -> torch.Tensor:
        reason = unserved(x)
        if reason:
            counter.count_fallback(reason)
            return original(self, x)
        counter.count_served()
        factor = ops.inverse_rms(x, getattr(self, eps))
        return x * factor if scales else factor

    return forward


def scaled_input_rms_norm(
    original: Callable[..., Any], counter: CallCounter, *, eps: str, offset: float
) -> Callable[..., torch.Tensor]:
    """The row times its weight, rounded, and then an RMSNorm without a weight (Muse Spark).

    Args:
        eps: Attribute of the module.
        offset: Added to the weight, in the weight's dtype.
    """

    def forward(self: AnyModule, x: torch.Tensor) -> torch.Tensor:
        reason = unserved(x, self.weight)
        if not reason and self.weight.dtype != x.dtype:
            reason = f"weight dtype {str(self.weight.dtype).removeprefix('torch.')}"
        if reason:
            counter.count_fallback(reason)
            return original(self, x)
        counter.count_served()
        return elementwise(ops.rms_norm, x * (self.weight + offset), None, getattr(self, eps), fixed=1)

    return forward


def biased_rms_norm(
    original: Callable[..., Any], counter: CallCounter, *, eps: str, fp32_if: str
) -> Callable[..., torch.Tensor]:
    """RMSNorm with an optional weight and an optional bias, each applied in the input's dtype (xLSTM).

    Args:
        eps: Attribute of the module.
        fp32_if: Attribute that says whether the mean square is taken in fp32.
    """

    def forward(self: AnyModule, x: torch.Tensor) -> torch.Tensor:
        reason = unserved(x, self.weight, self.bias) or weight_unserved(x, self.weight)
        if not reason and x.dtype != torch.float32 and not getattr(self, fp32_if):
            reason = "statistics in the input's dtype"
        if reason:
            counter.count_fallback(reason)
            return original(self, x)
        counter.count_served()
        normed = elementwise(ops.rms_norm, x, self.weight, getattr(self, eps), fixed=1)
        return normed if self.bias is None else normed + self.bias

    return forward


def switched_gated_rms_norm(
    original: Callable[..., Any], counter: CallCounter, *, eps: str, groups: str, norm_first_if: str
) -> Callable[..., torch.Tensor]:
    """RMSNorm in groups with a silu gate before or after it, rounded once (Falcon-H1).

    Args:
        eps: Attribute of the module.
        groups: Attribute that holds the number of groups of channels.
        norm_first_if: Attribute that says whether the gate comes after the norm.
    """

    def forward(
        self: AnyModule, hidden_states: torch.Tensor, gate: torch.Tensor | None = None
    ) -> torch.Tensor:
        count, norm_first = getattr(self, groups), bool(getattr(self, norm_first_if))
        reason = gate_unserved(hidden_states, gate, self.weight)
        if not reason and norm_first and count != 1:
            reason = "groups before the gate"
        if not reason and hidden_states.ndim not in (2, 3):
            reason = "a rank that is not served"
        if reason:
            counter.count_fallback(reason)
            return original(self, hidden_states, gate)
        counter.count_served()
        size = 0 if norm_first else hidden_states.shape[-1] // count
        gate, weight = widened(hidden_states, gate), widened(hidden_states, self.weight)
        arguments = gate, weight, getattr(self, eps), "silu", not norm_first, True, size
        return elementwise(ops.gated_rms_norm, hidden_states, *arguments, fixed=1)

    return forward


def layer_norm_then_affine(
    original: Callable[..., Any], counter: CallCounter, *, eps: float
) -> Callable[..., torch.Tensor]:
    """LayerNorm over the last dimension, rounded, and then a weight and bias of any shape (Chameleon)."""

    def forward(self: AnyModule, hidden_states: torch.Tensor) -> torch.Tensor:
        reason = unserved(hidden_states, self.weight, self.bias) or normalized_shape_unserved(
            self, hidden_states
        )
        if reason:
            counter.count_fallback(reason)
            return original(self, hidden_states)
        counter.count_served()
        return ops.layer_norm(hidden_states, None, None, eps) * self.weight + self.bias

    return forward


def multi_head_layer_norm(
    original: Callable[..., Any], counter: CallCounter, *, eps: str, fp32_if: str
) -> Callable[..., torch.Tensor]:
    """LayerNorm of each head, rounded; heads side by side; then an optional weight and bias (xLSTM).

    Args:
        eps, fp32_if: As in `biased_rms_norm`.
    """

    def forward(self: AnyModule, x: torch.Tensor) -> torch.Tensor:
        reason = unserved(x, self.weight, self.bias)
        if not reason and x.shape[2:] != (self.num_heads, self.head_dim):
            reason = "heads of another number or size"
        if not reason and x.dtype != torch.float32 and not getattr(self, fp32_if):
            reason = "statistics in the input's dtype"
        if reason:
            counter.count_fallback(reason)
            return original(self, x)
        counter.count_served()
        normed = ops.layer_norm(x, None, None, getattr(self, eps)).flatten(2)
        if self.weight is not None:
            normed = normed * self.weight
        return normed if self.bias is None else normed + self.bias

    return forward


def channel_layer_norm(original: Callable[..., Any], counter: CallCounter) -> Callable[..., torch.Tensor]:
    """``torch.nn.LayerNorm`` over the channels of images, which stand first or last (ConvNeXt, SAM)."""

    def forward(self: AnyModule, features: torch.Tensor) -> torch.Tensor:
        rows, is_first = features, self.data_format == "channels_first"
        reason = unserved(features, self.weight, self.bias)
        if not reason and torch.nn.LayerNorm.forward is not _LAYER_NORM_FORWARD:
            reason = "nn.LayerNorm was patched"
        if not reason and is_first:
            reason = "" if features.ndim == 4 else "no images"
            rows = features if reason else features.permute(0, 2, 3, 1)
        reason = reason or normalized_shape_unserved(self, rows)
        reason = reason or weight_unserved(rows, self.weight) or weight_unserved(rows, self.bias)
        if reason:
            counter.count_fallback(reason)
            return original(self, features)
        counter.count_served()
        normed = ops.layer_norm(rows, self.weight, self.bias, self.eps)
        return normed.permute(0, 3, 1, 2) if is_first else normed

    return forward
