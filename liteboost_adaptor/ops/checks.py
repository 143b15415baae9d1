"""Argument checks of the references, in the words of ``kernels/common/checks.cpp``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import DeviceError, DTypeError, ShapeError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def check_dtype(op: str, argument: str, tensor: Tensor) -> None:
    """Raise `DTypeError` unless ``tensor`` is float32, bfloat16 or float16, or float64 (reference only)."""
    if tensor.dtype not in DTYPES:
        raise DTypeError(
            f"liteboost::{op}: {argument} must be float32, bfloat16 or float16, got "
            f"{dtype_name(tensor.dtype)}; convert it, or use the plain PyTorch code for other dtypes"
        )


def check_same_dtype(
    op: str, argument: str, tensor: Tensor, of: str, reference: Tensor, or_float32: bool = False
) -> None:
    """Raise `DTypeError` unless ``tensor`` has the dtype of ``reference``, or float32 where allowed."""
    if tensor.dtype == reference.dtype or (or_float32 and tensor.dtype == torch.float32):
        return
    also = " or float32" if or_float32 else ""
    raise DTypeError(
        f"liteboost::{op}: {argument} must have the dtype of {of} ({dtype_name(reference.dtype)}){also}, "
        f"got {dtype_name(tensor.dtype)}; convert one of them"
    )


def check_same_device(op: str, argument: str, tensor: Tensor, of: str, reference: Tensor) -> None:
    """Raise `DeviceError` unless both tensors are on one device."""
    if tensor.device != reference.device:
        raise DeviceError(
            f"liteboost::{op}: {argument} must be on the device of {of} ({reference.device}), "
            f"got {tensor.device}; move one of them"
        )


def check_same_shape(op: str, argument: str, tensor: Tensor, of: str, reference: Tensor) -> None:
    """Raise `ShapeError` unless both tensors have one shape."""
    if tensor.shape != reference.shape:
        raise ShapeError(
            f"liteboost::{op}: {argument} must have the shape of {of} = {shape_text(reference.shape)}, "
            f"got {shape_text(tensor.shape)}; expand it before the call"
        )


def check_vector(op: str, argument: str, tensor: Tensor, size: int, what: str) -> None:
    """Raise `ShapeError` unless ``tensor`` is one vector of ``size`` elements."""
    if tensor.dim() != 1 or tensor.shape[0] != size:
        raise ShapeError(
            f"liteboost::{op}: {argument} must have shape [{what}] = [{size}], got "
            f"{shape_text(tensor.shape)}; pass the {argument} that belongs to this layer, whole"
        )


def shape_text(shape: Sequence[int]) -> str:
    """``[2, 3]``, as C++ writes a shape."""
    return f"[{', '.join(str(size) for size in shape)}]"
