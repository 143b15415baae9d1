"""Attention while the tokens of a prompt, or the keys of a cache, are shared by several processes.

What is computed then is another's (`parallel.sequence`); here is only where served attention asks for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention on this rank.

    Attributes:
        module: The attention module.
        query, key, value: Of this rank's tokens, ``[batch, heads, tokens, dim]``.
        mask: For all that attend together, as `parallel.sequence.masks` makes it. None: causality alone.
        sinks: As the op takes them.
        reason: Why the op would not serve this call, or empty.
    """

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    scaling: float
    softcap: float
    sinks: torch.Tensor | None
    reason: str


class DistributedAttention(Protocol):
    """What attention is while it lasts.

    Attributes:
        updates: How often layers of the cache have been given keys, which they count.
    """

    updates: int

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """``[batch, tokens, heads, value_dim]`` over all tokens that this rank's see."""


_active: list[DistributedAttention] = []


def active_distributed_attention() -> DistributedAttention | None:
    """What attention is at the moment, if it is not this process's alone."""
    return _active[-1] if _active else None


@contextlib.contextmanager
def use_distributed_attention(what: DistributedAttention) -> Iterator[None]:
    """Let attention be ``what``."""
    _active.append(what)
    try:
        yield
    finally:
        _active.remove(what)
