"""What kv8 does, in plain PyTorch: caches of transformers whose states are rounded before they are kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..ops.int8_attention import dequantized, quantize_kv


def rounded(states: torch.Tensor) -> torch.Tensor:
    """The values that integers of 8 bits and a scale for each token and head stand for."""
    return dequantized(quantize_kv(states), states.dtype)


@contextmanager
def rounding() -> Iterator[None]:
    """In the block, every cache of transformers keeps rounded states."""
    from transformers.cache_utils import Cache

    original = Cache.update

    def update(self: Any, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, rounded(key_states), rounded(value_states), *args, **kwargs)

    Cache.update = update
    try:
        yield
    finally:
        Cache.update = original
