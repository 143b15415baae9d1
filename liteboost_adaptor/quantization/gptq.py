"""Rounding a weight column by column, each error made up for by the columns that are still to come."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import QuantizationError
from .rounding import Quantized, fit, pack, round_to
from .schemes import Scheme

#: What is added to the diagonal of the Gram matrix, as a share of its mean.
DAMPING = 0.01
#: Columns after which the rest of the weight hears of the errors, where a scale spans all of them.
BLOCK = 128


def quantize(weight: Tensor, scheme: Scheme, gram: Tensor, name: str = "the weight") -> Quantized:
    """Round ``weight`` ``[out, in]`` to the integers of ``scheme``.

    Args:
        weight: Floating point. Computed in fp32.
        scheme: What to round to. A group's scale is that of its columns as they are when their turn comes.
        gram: ``[in, in]``, sum of outer products of the rows that the layer has read.
        name: What errors call it.

    Raises:
        QuantizationError: Nothing was read, or it holds NaN or infinity.

    Source: Frantar et al. 2022, arXiv:2210.17323.
    """
    upper = _inverse_root(gram, name)
    left = weight.float().clone()
    width = left.shape[1]
    block = scheme.group_size if scheme.bits == 4 else BLOCK
    whole = fit(left[:, None, :], scheme) if scheme.bits == 8 else None
    integers, scales, zeros = torch.empty_like(left), [], []
    for begin in range(0, width, block):
        end = min(begin + block, width)
        part = left[:, begin:end]
        scale, zero = whole or fit(part[:, None, :], scheme)
        scales.append(scale)
        zeros.append(zero)
        errors = torch.empty_like(part)
        for at in range(end - begin):
            row = upper[begin + at]
            rounded = round_to(part[:, None, at : at + 1], scale, zero, scheme)[:, 0, 0]
            error = (part[:, at] - (rounded - zero[:, 0]) * scale[:, 0]) / row[begin + at]
            part[:, at:].addr_(error, row[begin + at : end], alpha=-1)
            integers[:, begin + at], errors[:, at] = rounded, error
        left[:, end:] -= errors @ upper[begin:end, end:]
    if whole is not None:
        return pack(integers, whole[0], whole[1], scheme)
    return pack(integers, torch.cat(scales, 1), torch.cat(zeros, 1), scheme)


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
