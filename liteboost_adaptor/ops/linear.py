"""``x @ weight^T + bias``: few rows by kernels of ours, many by torch's own product."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..errors import ShapeError
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
    _check_linear(x, weight, bias)
    # As a matrix: where x is permuted, F.linear rounds the product of 16-bit values before it adds the bias.
    rows = x.flatten(0, -2) if x.dim() > 2 else x
    return F.linear(rows, weight, bias).reshape(*x.shape[:-1], weight.shape[0]).contiguous()


def _check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    op = "linear"
    if x.dim() < 1:
        raise ShapeError(
            f"liteboost::{op}: x must have shape [..., in_features], got a scalar; add a dimension"
        )
    if weight.dim() != 2:
        raise ShapeError(
            f"liteboost::{op}: weight must have shape [out_features, in_features], got "
            f"{shape_text(weight.shape)}; pass it as nn.Linear stores it"
        )
    check_dtype(op, "x", x)
    check_same_dtype(op, "weight", weight, "x", x)
    check_same_device(op, "weight", weight, "x", x)
    if x.shape[-1] != weight.shape[1]:
        raise ShapeError(
            f"liteboost::{op}: x must have shape [..., in_features] with in_features = {weight.shape[1]} as "
            f"weight {shape_text(weight.shape)} has, got {shape_text(x.shape)}; pass the weight of this "
            "layer, not transposed"
        )
    if bias is None:
        return
    check_same_dtype(op, "bias", bias, "x", x)
    check_same_device(op, "bias", bias, "x", x)
    if bias.shape != weight.shape[:1]:
        raise ShapeError(
            f"liteboost::{op}: bias must have shape [out_features] = [{weight.shape[0]}], got "
            f"{shape_text(bias.shape)}; pass the bias of this layer"
        )


define("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", linear)
