"""A linear layer of its own for each head."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ShapeError
from .checks import check_dtype, check_same_device, check_same_dtype, shape_text
from .registry import define


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply the rows of each head by the weight of that head. For few rows.

    Args:
        x: ``[batch, num_heads, rows, in_features]``, fp32/bf16/fp16 (here also fp64). Any strides; read in
            place by the kernel where the last dimension is contiguous, copied otherwise.
        weight: ``[num_heads, out_features, in_features]``, dtype of ``x``. Read in place by the kernel where
            either of the last two dimensions is contiguous, copied otherwise.

    Returns:
        ``[batch, num_heads, rows, out_features]``, dtype of ``x``, contiguous.

    Raises:
        ShapeError: A shape does not fit the other.
        DTypeError: The dtypes differ, or are not in the list above.
        DeviceError: The tensors are not on one device.

    Numerics:
        In fp32 (fp64 for fp64), rounded once.

    Source:
        ``nn.Linear``; of each head: multi-head latent attention, DeepSeek-AI 2024, arXiv:2405.04434.
    """
    _check(x, weight)
    compute = torch.promote_types(x.dtype, torch.float32)
    return (x.to(compute) @ weight.to(compute).mT).to(x.dtype).contiguous()


def _check(x: Tensor, weight: Tensor) -> None:
    op = "head_linear"
    if x.dim() != 4:
        raise ShapeError(
            f"liteboost::{op}: x must have shape [batch, num_heads, rows, in_features], got "
            f"{shape_text(x.shape)}; reshape it"
        )
    if weight.dim() != 3:
        raise ShapeError(
            f"liteboost::{op}: weight must have shape [num_heads, out_features, in_features], got "
            f"{shape_text(weight.shape)}; give it a dimension for the heads"
        )
    check_dtype(op, "x", x)
    check_same_dtype(op, "weight", weight, "x", x)
    check_same_device(op, "weight", weight, "x", x)
    wanted, found = (x.shape[1], x.shape[3]), (weight.shape[0], weight.shape[2])
    if wanted != found:
        raise ShapeError(
            f"liteboost::{op}: weight must have the num_heads and in_features of x = {shape_text(wanted)}, "
            f"got {shape_text(found)}; pass a weight for each head of x"
        )


define("head_linear(Tensor x, Tensor weight) -> Tensor", head_linear)
