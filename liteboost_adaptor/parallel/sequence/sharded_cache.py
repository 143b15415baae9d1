"""A KV cache that is sharded by tokens over the ranks that share a prompt.

A rank keeps those of its part of the prompt and of every n-th token behind it. What a layer says of its
length is what the model is to believe: while a prompt is shared, that all tokens before this rank's part have
been seen.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...errors import ParallelError
from ...replacements import sequence

#: Attribute of a cache: its `CacheShard`.
CACHE_SHARD = "_liteboost_held"
#: Layers of transformers that can be sharded; masks apply the window then.
_SUPPORTED_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")


class CacheShard:
    """Which tokens this rank holds, in all layers.

    Attributes:
        seen: Tokens in the cache, on all ranks together.
        positions: Of the tokens that this rank holds.
        kept: Which of the incoming tokens it keeps.
        window: Of how many tokens all layers would have kept no more than the last; None: some keep all.
        returns_own: Whether a layer gives the new tokens back and not all that it holds.
    """

    def __init__(self) -> None:
        self.seen = 0
        self.positions = torch.empty(0, dtype=torch.int64)
        self.kept = slice(None)
        self.returns_own = False
        self.window: int | None = None

    def keep_every_nth(self, count: int, rank: int, size: int) -> None:
        """Choose which of the next ``count`` tokens, which every rank computes, this one keeps."""
        first = (rank - self.seen) % size
        self.kept, self.returns_own = slice(first, None, size), False
        self.positions = torch.cat([self.positions, torch.arange(self.seen, self.seen + count)[self.kept]])
        self.seen += count

    def keep_range(self, first: int, last: int, length: int) -> None:
        """Of ``length`` tokens, this rank computes and keeps those from ``first`` to ``last``."""
        self.kept, self.returns_own = slice(None), True
        self.positions = torch.arange(first, last)
        self.seen = length


@functools.cache
def _layer_class() -> type:
    from transformers.cache_utils import DynamicLayer

    class ShardedCacheLayer(DynamicLayer):
        """A layer of a sharded cache."""

        def __init__(self, held: CacheShard) -> None:
            super().__init__()
            self.held = held
            self.reported_length = 0

        def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
            super().lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            self.reported_length += key_states.shape[-2]
            if (attention := sequence.active_distributed_attention()) is not None:
                attention.updates += 1
            kept = self.held.kept
            self.keys = torch.cat([self.keys, key_states[:, :, kept]], dim=-2)
            self.values = torch.cat([self.values, value_states[:, :, kept]], dim=-2)
            if not self.held.returns_own:
                return self.keys, self.values
            own = slice(-key_states.shape[-2], None)  # as they are kept, which may be as integers
            return self.keys[:, :, own], self.values[:, :, own]

        def get_seq_length(self) -> int:
            return self.reported_length

        def crop(self, tokens_to_remove: int) -> None:
            raise ParallelError(
                "tokens cannot be taken out of a cache that processes share, as assisted generation does. "
                "Start the script with LITEBOOST_SP=1 and LITEBOOST_CP=1."
            )

        def reset(self) -> None:
            raise ParallelError("a cache that processes share cannot be used again. Make a new one.")

    return ShardedCacheLayer


def cache_shard_of(cache: Any) -> CacheShard | None:
    """The shard of a sharded cache, of all its layers; None for another cache.

    Layers that a model has appended, as copies of others (Dory, a loop of layers), brought a copy of it.

    Raises:
        ParallelError: It has appended others.
    """
    held: CacheShard | None = getattr(cache, CACHE_SHARD, None)
    for layer in cache.layers if held is not None else ():
        if not isinstance(layer, _layer_class()):
            raise ParallelError(
                f"the model has put a {type(layer).__name__} into a cache that processes share. Start the "
                "script with LITEBOOST_SP=1 and LITEBOOST_CP=1."
            )
        layer.held = held
    return held


def shard_cache(cache: Any, layers: int) -> CacheShard:
    """Shard an empty ``cache`` of transformers.

    Raises:
        ParallelError: It is of a kind that cannot be, or holds tokens.
    """
    kinds = {type(layer).__name__ for layer in cache.layers}
    unknown = sorted(kinds - set(_SUPPORTED_LAYERS))
    if type(cache).__name__ != "DynamicCache" or unknown or getattr(cache, "offloading", False):
        raise ParallelError(
            f"a {type(cache).__name__}{' of ' + unknown[0] if unknown else ''} cannot be shared by processes "
            "that share a prompt. Use the default cache, or LITEBOOST_SP=1 and LITEBOOST_CP=1."
        )
    if cache.get_seq_length():
        raise ParallelError(
            "a cache that was filled before holds its tokens on every process, and a prompt behind them "
            "cannot be shared. Begin with an empty cache."
        )
    held, made = CacheShard(), _layer_class()
    if kinds == {_SUPPORTED_LAYERS[1]}:
        held.window = min(layer.sliding_window for layer in cache.layers)
    cache.layers = [made(held) for _ in cache.layers or range(layers)]
    cache.layer_class_to_replicate = None
    setattr(cache, CACHE_SHARD, held)
    return held


def set_reported_length(cache: Any, length: int) -> None:
    """Let all layers of a sharded cache report that they hold ``length`` tokens."""
    for layer in cache.layers:
        layer.reported_length = length
