"""`head_linear` beside plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .op_case import HEADS, Case, case

#: Of a head of DeepSeek V3: the part of a key that is not rotated, and of what keys and values are made.
UNROTATED, RANK = 128, 512


def _plain(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.mT


def head_linear(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    """The two products of multi-head latent attention: of queries, and of what attention finds."""
    weight = torch.randn(HEADS, 2 * UNROTATED, RANK).to(dtype) / RANK**0.5
    for part in (weight[:, :UNROTATED].mT, weight[:, UNROTATED:]):
        x = torch.randn(1, HEADS, rows, part.shape[2]).to(dtype)
        yield case("head_linear", f"{list(x.shape)} x {list(part.shape)}", _plain, x, part)
