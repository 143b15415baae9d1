"""The bytes that decoding one token must move, from a model's configuration alone.

Every weight once (of the embedding one row a sequence), the keys and values seen so far once, the new ones
written once. Activations are left out: they can stay on the chip.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MustMove:
    """Bytes of one decode step by what they are."""

    weights: int
    cache: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache


def must_move(config: Any, context: int, batch: int = 1, element_size: int = 2) -> MustMove:
    """Bytes that one decode step of a dense decoder moves at least.

    Args:
        config: Of a Llama-like model: hidden_size, intermediate_size, num_hidden_layers, heads, vocab_size.
        context: Positions in the cache once the step is done, its own included.
        batch: Sequences.
        element_size: Bytes of a weight and of a cached value.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    qkv = hidden * (heads + 2 * kv_heads) * head_dim
    if getattr(config, "attention_bias", False):
        qkv += (heads + 2 * kv_heads) * head_dim + hidden
    layer = qkv + heads * head_dim * hidden + 3 * hidden * config.intermediate_size + 2 * hidden
    if config.model_type == "qwen3":
        layer += 2 * head_dim
    weights = config.num_hidden_layers * layer + hidden + config.vocab_size * hidden + batch * hidden
    # Every position is read once; of the last, which is new, that is its write.
    cache = batch * config.num_hidden_layers * 2 * kv_heads * head_dim * context
    return MustMove(weights * element_size, cache * element_size)
