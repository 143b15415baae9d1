"""`attention_part` beside plain PyTorch, which has no operator with the logarithm of the sum on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .op_case import CONTEXT, HEAD_DIM, HEADS, KV_HEADS, Case, case


def _plain(query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float) -> tuple[Tensor, Tensor]:
    groups = HEADS // KV_HEADS
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = (query @ key.transpose(2, 3) * scaling).float()
    lse = torch.logsumexp(logits, -1)
    output = torch.exp(logits - lse.unsqueeze(-1)) @ value.float()
    return output.transpose(1, 2).contiguous(), lse.transpose(1, 2).contiguous()


def attention_part(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    """All keys are seen, as those of a part that another process has passed on."""
    query = torch.randn(1, rows, HEADS, HEAD_DIM).to(dtype).transpose(1, 2)
    key, value = (torch.randn(1, KV_HEADS, max(rows, CONTEXT), HEAD_DIM).to(dtype) for _ in range(2))
    shapes = f"{list(query.shape)}, {list(key.shape)}"
    yield case("attention_part", shapes, _plain, query, key, value, None, HEAD_DIM**-0.5)
