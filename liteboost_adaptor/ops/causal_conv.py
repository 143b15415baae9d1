"""The short causal convolution of each channel by itself, in front of linear attention and state spaces."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ShapeError
from .activation import ActivationError
from .checks import check_dtype, check_same_device, check_same_dtype, check_vector, shape_text
from .registry import define

ACTIVATIONS = ("none", "silu")


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    """Convolve each channel with its own weights over the last ``taps`` tokens; before the first are zeros.

    Args:
        x: ``[batch, channels, tokens]``, fp32/bf16/fp16 (here also fp64). Any strides, read in place.
        weight: ``[channels, taps]``, dtype of ``x``; that of ``nn.Conv1d`` with a group a channel, squeezed.
        bias: ``[channels]``, dtype of ``x``, or None.
        activation: ``"none"`` or ``"silu"``.

    Returns:
        Shape and dtype of ``x``, contiguous.

    Raises:
        ShapeError: The shapes do not fit together.
        DTypeError: The dtypes differ, or are not in the list above.
        DeviceError: The tensors are on different devices.
        ActivationError: Another activation.

    Numerics:
        Sum and activation in fp32, rounded once. The original rounds before the activation too.

    Source:
        ``causal_conv1d_fn`` of transformers 5.23.
    """
    _check("causal_conv1d", x, weight, bias, activation)
    return _convolved(F.pad(x, (weight.shape[1] - 1, 0)), weight, bias, activation)


def causal_conv1d_update(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none"
) -> Tensor:
    """The same for tokens that follow others, of which ``state`` has the last; ``state`` is updated in place.

    Args:
        x: As in `causal_conv1d`.
        state: ``[batch, channels, length]``, dtype of ``x``, with a ``length`` of ``taps - 1`` at least. Any
            strides. Afterwards the last ``length`` columns of state and ``x`` together.
        weight: As there.
        bias: As there.
        activation: As there.

    Returns:
        Shape and dtype of ``x``, contiguous.

    Raises:
        ShapeError: The shapes do not fit together.
        DTypeError: The dtypes differ, or are not those of `causal_conv1d`.
        DeviceError: The tensors are on different devices.
        ActivationError: Another activation.

    Numerics:
        Those of `causal_conv1d`.

    Source:
        ``causal_conv1d_update`` of transformers 5.23.
    """
    op = "causal_conv1d_update"
    _check(op, x, weight, bias, activation)
    check_same_dtype(op, "state", state, "x", x)
    check_same_device(op, "state", state, "x", x)
    before = weight.shape[1] - 1
    if state.dim() != 3 or state.shape[:2] != x.shape[:2] or state.shape[2] < before:
        raise ShapeError(
            f"liteboost::{op}: state must have shape [batch, channels, at least taps - 1] = "
            f"{shape_text((*x.shape[:2], before))}, got {shape_text(state.shape)}; pass the state "
            "of this layer"
        )
    both = torch.cat([state, x], -1)
    length = state.shape[2]
    state.copy_(both[..., both.shape[-1] - length :])
    return _convolved(both[..., length - before :], weight, bias, activation)


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """``x`` has ``taps - 1`` tokens more than the result."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    tokens = x.shape[2] - weight.shape[1] + 1
    out = x.new_zeros((*x.shape[:2], tokens), dtype=dtype)
    if bias is not None:
        out += bias.to(dtype)[:, None]
    for tap in range(weight.shape[1]):
        out += weight[:, tap, None].to(dtype) * x[:, :, tap : tap + tokens].to(dtype)
    return (F.silu(out) if activation == "silu" else out).to(x.dtype)


def _check(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> None:
    if x.dim() != 3:
        raise ShapeError(
            f"liteboost::{op}: x must have shape [batch, channels, tokens], got {shape_text(x.shape)}; "
            "channels stand before tokens, as in torch's convolutions"
        )
    check_dtype(op, "x", x)
    check_same_dtype(op, "weight", weight, "x", x)
    check_same_device(op, "weight", weight, "x", x)
    if weight.dim() != 2 or weight.shape[0] != x.shape[1] or weight.shape[1] < 1:
        raise ShapeError(
            f"liteboost::{op}: weight must have shape [channels, taps] with channels = {x.shape[1]} and a "
            f"tap at least, got {shape_text(weight.shape)}; squeeze nn.Conv1d's in dimension 1"
        )
    if bias is not None:
        check_same_dtype(op, "bias", bias, "x", x)
        check_same_device(op, "bias", bias, "x", x)
        check_vector(op, "bias", bias, x.shape[1], "channels")
    if activation not in ACTIVATIONS:
        raise ActivationError(
            f"liteboost::{op}: activation must be none or silu, got '{activation}'; apply another one "
            "behind the op"
        )


define(
    'causal_conv1d(Tensor x, Tensor weight, Tensor? bias=None, str activation="none") -> Tensor',
    causal_conv1d,
)
define(
    "causal_conv1d_update(Tensor x, Tensor(a!) state, Tensor weight, Tensor? bias=None, "
    'str activation="none") -> Tensor',
    causal_conv1d_update,
)
