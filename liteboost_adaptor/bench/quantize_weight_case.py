"""Rounding weights, beside the same search in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..ops import quantize_weight as reference
from .op_case import HIDDEN, Case, case

#: Columns that share a scale, of 4 bits.
GROUP = 32


def quantize_w8(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    """As many outputs as there are rows, while a model is loaded."""
    weight = torch.randn(rows, HIDDEN).to(dtype)
    yield case("quantize_w8", str(list(weight.shape)), reference.quantize_w8, weight, torch.float32)


def quantize_w4(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    """As many outputs as there are rows, while a model is loaded."""
    weight = torch.randn(rows, HIDDEN).to(dtype)
    for symmetric in (True, False):
        label = f"{list(weight.shape)}, {'symmetric' if symmetric else 'zero points'}"
        form = weight, GROUP, symmetric, torch.bfloat16
        yield case("quantize_w4", label, reference.quantize_w4, *form)
