"""``x @ weight^T + bias``, alone and as the two layers of a gated MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..errors import ShapeError
from .activation import check_activation, gated_activation
from .checks import check_dtype, check_same_device, check_same_dtype, shape_text
from .registry import define


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply an ``nn.Linear`` weight and bias to ``x``.

    Args:
        x: ``[..., in_features]``, fp32/bf16/fp16 (here also fp64). Any strides.
        weight: ``[out_features, in_features]``, dtype of ``x``. Read in place by the kernel, a slice of rows
            and columns too. Where it is transposed, or ``x`` has many rows, torch's own linear runs.
        bias: ``[out_features]``, dtype of ``x``, or None.

    Returns:
        ``[..., out_features]``, dtype of ``x``, contiguous.

    Raises:
        ShapeError: The shapes do not fit together.
        DTypeError: The dtypes differ, or are not in the list above.
        DeviceError: The tensors are on different devices.

    Numerics:
        Products summed in fp32, the bias added in fp32, rounded once. The result does not depend on the
        number of threads. On CPUs with AVX-512 BF16, bf16 values and partial sums below 2^-126 count as 0.

    Source:
        ``torch.nn.functional.linear``; the layout is that of ``nn.Linear``.
    """
    _check_x("linear", x)
    _check_layer("linear", "", x, weight, bias)
    # As a matrix: where x is permuted, F.linear rounds the product of 16-bit values before it adds the bias.
    rows = x.flatten(0, -2) if x.dim() > 2 else x
    return F.linear(rows, weight, bias).reshape(*x.shape[:-1], weight.shape[0]).contiguous()


def gated_linear(
    x: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    up_weight: Tensor,
    up_bias: Tensor | None,
    activation: str = "silu",
    alpha: float = 1.0,
) -> Tensor:
    """The two layers of a gated MLP and what is between them: ``act(linear(x, gate)) * linear(x, up)``.

    Args:
        x: As in `linear`.
        gate_weight: ``[intermediate_size, in_features]``, as ``weight`` in `linear`.
        gate_bias: ``[intermediate_size]``, as ``bias`` in `linear`, or None.
        up_weight: Shape and dtype of ``gate_weight``.
        up_bias: As ``gate_bias``, or None, whatever that is.
        activation: As in `gated_activation`.
        alpha: As in `gated_activation`.

    Returns:
        ``[..., intermediate_size]``, dtype of ``x``, contiguous.

    Raises:
        ShapeError: The shapes do not fit together.
        DTypeError: The dtypes differ, or are not those of `linear`.
        DeviceError: The tensors are on different devices.
        ActivationError: Unknown activation, or alpha with another one than silu.

    Numerics:
        Those of `linear` and of `gated_activation`: gate and up are rounded to the dtype of ``x``.

    Source:
        Shazeer 2020, arXiv:2002.05202 (SwiGLU, GEGLU).
    """
    op = "gated_linear"
    _check_x(op, x)
    _check_layer(op, "gate_", x, gate_weight, gate_bias)
    _check_layer(op, "up_", x, up_weight, up_bias)
    if gate_weight.shape[0] != up_weight.shape[0]:
        raise ShapeError(
            f"liteboost::{op}: up_weight must have out_features = {gate_weight.shape[0]} as gate_weight "
            f"{shape_text(gate_weight.shape)} has, got {shape_text(up_weight.shape)}; pass the two layers "
            "of one gated MLP"
        )
    check_activation(op, activation, alpha)
    gate, up = linear(x, gate_weight, gate_bias), linear(x, up_weight, up_bias)
    return gated_activation(gate, up, activation, alpha)


def _check_x(op: str, x: Tensor) -> None:
    if x.dim() < 1:
        raise ShapeError(
            f"liteboost::{op}: x must have shape [..., in_features], got a scalar; add a dimension"
        )
    check_dtype(op, "x", x)


def _check_layer(op: str, prefix: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Check a weight and its bias, whose arguments' names begin with ``prefix``, against ``x``."""
    if weight.dim() != 2:
        raise ShapeError(
            f"liteboost::{op}: {prefix}weight must have shape [out_features, in_features], got "
            f"{shape_text(weight.shape)}; pass it as nn.Linear stores it"
        )
    check_same_dtype(op, f"{prefix}weight", weight, "x", x)
    check_same_device(op, f"{prefix}weight", weight, "x", x)
    if x.shape[-1] != weight.shape[1]:
        raise ShapeError(
            f"liteboost::{op}: x must have shape [..., in_features] with in_features = {weight.shape[1]} as "
            f"{prefix}weight {shape_text(weight.shape)} has, got {shape_text(x.shape)}; pass the weight of "
            "this layer, not transposed"
        )
    if bias is None:
        return
    check_same_dtype(op, f"{prefix}bias", bias, "x", x)
    check_same_device(op, f"{prefix}bias", bias, "x", x)
    if bias.shape != weight.shape[:1]:
        raise ShapeError(
            f"liteboost::{op}: {prefix}bias must have shape [out_features] = [{weight.shape[0]}], got "
            f"{shape_text(bias.shape)}; pass the bias of this layer"
        )


define("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", linear)
define(
    "gated_linear(Tensor x, Tensor gate_weight, Tensor? gate_bias, Tensor up_weight, Tensor? up_bias, "
    'str activation="silu", float alpha=1.0) -> Tensor',
    gated_linear,
)
