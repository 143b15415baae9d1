"""GPTQ: a weight rounded column by column, each error compensated by the columns that are still to come."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import QuantizationError
from ...ops.quantize_weight import fit_scales, round_to_integers
from ..schemes import QuantizedTensor, QuantScheme
from ..schemes.rounding import check_scales

#: What is added to the diagonal of the Gram matrix, as a share of its mean.
DAMPING = 0.01
#: Columns after which the rest of the weight hears of the errors, where a scale spans all of them.
BLOCK = 128


def quantize(weight: Tensor, scheme: QuantScheme, gram: Tensor, name: str = "the weight") -> QuantizedTensor:
    """Round ``weight`` ``[out, in]`` to the integers of ``scheme``.

    Args:
        weight: Floating point. Computed in fp32.
        scheme: What to round to. A group's scale is that of its columns as they are when their turn comes.
        gram: ``[in, in]``, sum of outer products of the rows that the layer has read.
        name: What errors call it.

    Raises:
        QuantizationError: Nothing was read, or it or the weight holds NaN or infinity.

    Source: Frantar et al. 2022, arXiv:2210.17323.
    """
    upper = _inverse_root(gram, name)
    residual = weight.float().clone()
    block = scheme.group_size if scheme.bits == 4 else BLOCK
    rounded_to = scheme.bits, scheme.symmetric
    per_channel = None
    if scheme.bits == 8:
        per_channel = fit_scales(residual[:, None, :], *rounded_to, scheme.scale_dtype)
    integers, fitted = torch.empty_like(residual), []
    for begin in range(0, residual.shape[1], block):
        columns = residual[:, begin : begin + block]
        end = begin + columns.shape[1]
        scale, zero = per_channel or fit_scales(columns[:, None, :], *rounded_to, scheme.scale_dtype)
        fitted.append((scale, zero))
        errors = torch.empty_like(columns)
        for at in range(end - begin):
            row = upper[begin + at]
            rounded = round_to_integers(columns[:, None, at : at + 1], scale, zero, *rounded_to)[:, 0, 0]
            error = (columns[:, at] - (rounded - zero[:, 0]) * scale[:, 0]) / row[begin + at]
            columns[:, at:].addr_(error, row[begin + at : end], alpha=-1)
            integers[:, begin + at], errors[:, at] = rounded, error
        residual[:, end:] -= errors @ upper[begin:end, end:]
    scales, zeros = per_channel or (torch.cat(parts, 1) for parts in zip(*fitted, strict=True))
    result = QuantizedTensor.pack(integers, scales, zeros, scheme)
    check_scales(result, weight, name)
    return result


def _inverse_root(gram: Tensor, name: str) -> Tensor:
    """The upper factor of the inverse, in fp32."""
    wide = gram.double()
    mean = wide.diagonal().mean().item()
    if not (mean > 0 and torch.isfinite(wide).all()):
        raise QuantizationError(
            f"{name} has read nothing but zeros, or what is no number, while the model was calibrated: use "
            "another text, or leave the layer out with modules_to_not_convert"
        )
    wide = wide + torch.eye(len(wide), dtype=torch.float64) * DAMPING * mean
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(wide))
    return torch.linalg.cholesky(inverse, upper=True).float()
