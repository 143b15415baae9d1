"""Weights to the integers and scales of a scheme, by `quantize_w8` and `quantize_w4`."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import native
from ...errors import QuantizationError
from .scheme import QuantScheme
from .tensor import QuantizedTensor

#: Elements worked on at a time: what rounding needs beside the weight stays small.
CHUNK = 1 << 20
#: What the ops read as it is.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quantize(weight: Tensor, scheme: QuantScheme, name: str = "the weight") -> QuantizedTensor:
    """Round ``weight`` ``[out, in]`` to the integers of ``scheme``.

    Args:
        weight: Floating point. Computed in fp32.
        scheme: What to round to; ``in`` must suit it (`QuantScheme.why_unsupported`).
        name: What errors call it.

    Raises:
        QuantizationError: The weight holds NaN or infinity, is too large for scales of the scheme, or does
            not suit it.
    """
    native.require("rounding weights")
    reason = scheme.why_unsupported(*weight.shape)
    if reason:
        raise QuantizationError(f"{name} {list(weight.shape)} cannot be quantized to {scheme.name}: {reason}")
    chunks = weight.detach().split(max(1, CHUNK // max(1, weight.shape[1]))) if len(weight) else (weight,)
    return QuantizedTensor.cat([_quantize(chunk, scheme, name) for chunk in chunks])


def _quantize(weight: Tensor, scheme: QuantScheme, name: str) -> QuantizedTensor:
    weight = weight if weight.dtype in _DTYPES else weight.float()
    ops, dtype = torch.ops.liteboost, scheme.scale_dtype
    if scheme.bits == 8:
        result = QuantizedTensor(*ops.quantize_w8(weight, dtype))
    else:
        packed, scales, zeros = ops.quantize_w4(weight, scheme.group_size, scheme.symmetric, dtype)
        result = QuantizedTensor(packed, scales, None if scheme.symmetric else zeros)
    check_scales(result, weight, name)
    return result


def check_scales(quantized: QuantizedTensor, weight: Tensor, name: str) -> None:
    """Raise `QuantizationError` where a scale of ``weight``, which is called ``name``, is none."""
    if not quantized.scales.isnan().any():
        return
    check_finite(weight, name)
    raise QuantizationError(
        f"{name} holds values up to {weight.abs().max():.3g}, too large for scales in "
        f"{quantized.scales.dtype}: leave the layer out with modules_to_not_convert"
    )


def check_finite(weight: Tensor, name: str) -> None:
    """Raise `QuantizationError` where ``weight``, which is called ``name``, holds NaN or infinity."""
    if weight.numel() and not torch.stack(weight.aminmax()).isfinite().all():  # reads it, and makes no copy
        raise QuantizationError(
            f"{name} holds values that are infinite or not a number: no scale is right for them. Repair the "
            "checkpoint, or leave the layer out with modules_to_not_convert."
        )
