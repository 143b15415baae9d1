"""Rows of integers: how they are made, and attention over them, beside plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.int8_attention import dequantized
from ..ops.int8_attention import quantize_kv as rows_of
from .op_case import CONTEXT, HEAD_DIM, HEADS, KV_HEADS, Case, case


def _plain_rows(x: Tensor) -> Tensor:
    top = x.float().abs().amax(-1, keepdim=True)
    return torch.cat([(x * (127 / top)).round().to(torch.int8), (top / 127).view(torch.int8)], dim=-1)


def quantize_kv(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    x = torch.randn(1, rows, KV_HEADS, HEAD_DIM).to(dtype).transpose(1, 2)
    yield case("quantize_kv", str(list(x.shape)), _plain_rows, x)


def int8_attention(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    """All keys are seen. Plain PyTorch multiplies such a cache out, and attends to that."""
    query = torch.randn(1, rows, HEADS, HEAD_DIM).to(dtype).transpose(1, 2)
    states = (torch.randn(1, KV_HEADS, max(rows, CONTEXT), HEAD_DIM).to(dtype) for _ in range(2))
    key, value = map(rows_of, states)

    def plain(query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float) -> Tensor:
        keys, values = dequantized(key, dtype), dequantized(value, dtype)
        found = F.scaled_dot_product_attention(query, keys, values, scale=scaling, enable_gqa=True)
        return found.transpose(1, 2).contiguous()

    shapes = f"{list(query.shape)}, {list(key.shape)} int8"
    yield case("int8_attention", shapes, plain, query, key, value, None, HEAD_DIM**-0.5)
