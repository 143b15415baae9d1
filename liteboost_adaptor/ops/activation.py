"""Activations, alone and in the middle of a gated MLP: ``act(gate) * up``."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import LiteBoostError, ShapeError
from .checks import check_dtype, check_same_device, check_same_dtype, check_same_shape
from .registry import define

#: Name -> the function of x and alpha, which is of silu only.
_FUNCTIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "silu": lambda x, alpha: x * torch.sigmoid(alpha * x),
    "gelu": lambda x, alpha: F.gelu(x),
    "gelu_tanh": lambda x, alpha: F.gelu(x, approximate="tanh"),
    "relu": lambda x, alpha: F.relu(x),
    "relu2": lambda x, alpha: F.relu(x).square(),
    "sigmoid": lambda x, alpha: torch.sigmoid(x),
}
ACTIVATIONS = tuple(_FUNCTIONS)


class ActivationError(LiteBoostError, ValueError):
    """An activation, or a parameter of one, that the op does not know."""


def gated_activation(
    gate: Tensor,
    up: Tensor,
    activation: str = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> Tensor:
    """Multiply ``up`` by the activated ``gate``.

    Args:
        gate: ``[..., intermediate_size]``, fp32/bf16/fp16 (here also fp64). Any strides. Read in place by the
            kernel: contiguous tensors, the two halves of one, the even and odd channels of one.
        up: Shape and dtype of ``gate``.
        activation: ``silu`` (``g * sigmoid(alpha * g)``), ``gelu`` (exact), ``gelu_tanh``,
            ``relu``, ``relu2`` (its square) or ``sigmoid``.
        alpha: Slope of silu's sigmoid; 1 for the others.
        limit: Clamps ``gate`` from above and ``up`` on both sides; None for no limit.
        up_offset: Added to ``up`` after the clamp.

    Returns:
        ``[..., intermediate_size]``, dtype of ``gate``, contiguous.

    Raises:
        ShapeError: The shapes differ.
        DTypeError: The dtypes differ, or are not in the list above.
        ActivationError: Unknown activation, negative limit, or alpha with another activation than silu.

    Numerics:
        All in fp32, rounded once, to ``gate.dtype``. The usual code rounds ``act(gate)`` before the product.

    Source:
        Shazeer 2020, arXiv:2002.05202; the clamped form is ``GptOssExperts`` in transformers 5.23.
    """
    _check_gated_activation(gate, up, activation, alpha, limit)
    compute = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(compute), up.to(compute)
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return (_FUNCTIONS[activation](g, alpha) * (u + up_offset)).to(gate.dtype).contiguous()


def activation(x: Tensor, activation: str, alpha: float = 1.0) -> Tensor:
    """Apply an activation function.

    Args:
        x: Any shape and strides, fp32/bf16/fp16 (here also fp64).
        activation: As in `gated_activation`.
        alpha: Slope of silu's sigmoid; 1 for the others.

    Returns:
        Shape and dtype of ``x``, contiguous.

    Raises:
        DTypeError: The dtype is not in the list above.
        ActivationError: Unknown activation, or alpha with another activation than silu.

    Numerics:
        All in fp32, rounded once. Activations written out in Python round after every step.

    Source:
        Hendrycks and Gimpel 2016, arXiv:1606.08415 (GELU); So et al. 2021, arXiv:2109.08668 (squared ReLU).
    """
    check_dtype("activation", "x", x)
    check_activation("activation", activation, alpha)
    compute = torch.promote_types(x.dtype, torch.float32)
    return _FUNCTIONS[activation](x.to(compute), alpha).to(x.dtype).contiguous()


def _check_gated_activation(
    gate: Tensor, up: Tensor, activation: str, alpha: float, limit: float | None
) -> None:
    op = "gated_activation"
    if gate.dim() < 1:
        raise ShapeError(
            f"liteboost::{op}: gate must have at least one dimension, got a scalar; pass gate.unsqueeze(0)"
        )
    check_dtype(op, "gate", gate)
    check_same_dtype(op, "up", up, "gate", gate)
    check_same_device(op, "up", up, "gate", gate)
    check_same_shape(op, "up", up, "gate", gate)
    if limit is not None and not limit >= 0:
        raise ActivationError(
            f"liteboost::{op}: limit must not be negative, got {limit}; pass None for no limit"
        )
    check_activation(op, activation, alpha)


def check_activation(op: str, activation: str, alpha: float) -> None:
    """Raise `ActivationError` for what is no activation, or an alpha for another one than silu."""
    if activation not in ACTIVATIONS:
        raise ActivationError(
            f"liteboost::{op}: activation must be one of {', '.join(ACTIVATIONS)}, got '{activation}'; "
            "pass one of these"
        )
    if alpha != 1.0 and activation != "silu":
        raise ActivationError(
            f"liteboost::{op}: alpha must be 1 unless activation is 'silu', got alpha = {alpha} "
            f"with activation '{activation}'; leave alpha out"
        )


define(
    'gated_activation(Tensor gate, Tensor up, str activation="silu", float alpha=1.0, float? limit=None, '
    "float up_offset=0.0) -> Tensor",
    gated_activation,
)
define("activation(Tensor x, str activation, float alpha=1.0) -> Tensor", activation)
