"""Processes that share batches and prompts beside the weights: who holds what, and what is exchanged.

As `parallel.data` and `parallel.sequence` do it. Counted for one process; of uneven parts, the longest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..parallel.sequence.ulysses import HeadShards
from ..parallel.tensor.plan import Layout
from .cards import Card, all_reduce_seconds, send_seconds

#: Elements of an fp32 logarithm beside the output that a process brings to the others.
_LOGARITHM = 1
_FP32 = 4


@dataclass(frozen=True)
class Sharing:
    """How many processes share what.

    Attributes:
        dp: Replicas, which share the sequences of a batch.
        sp, cp: Processes that share the tokens of a prompt, and exchange heads or pass on keys and values.
    """

    dp: int = 1
    sp: int = 1
    cp: int = 1

    @property
    def of_tokens(self) -> int:
        """Processes that share a prompt."""
        return self.sp * self.cp

    @property
    def processes(self) -> int:
        """All of them, that hold the same part of the weights."""
        return self.dp * self.of_tokens

    def rows(self, batch: int) -> int:
        """Sequences of a replica."""
        return math.ceil(batch / self.dp)

    def tokens(self, length: int) -> int:
        """Tokens of a prompt that a process computes."""
        return math.ceil(length / self.of_tokens)

    def attention_share(self) -> float:
        """Of the attention of a prompt, what the last process of a ring does: causality spares the others."""
        return (2 - 1 / self.cp) / self.of_tokens


@dataclass(frozen=True)
class Exchanged:
    """Bytes that a process sends in one layer's attention.

    Attributes:
        heads: Of a prompt, in exchange for other tokens (LITEBOOST_SP).
        passed: Of a prompt, keys and values in one of the ``cp - 1`` times that they are passed on.
        joined: Of a later token, to the sum that joins partial results.
    """

    heads: float
    passed: float
    joined: float

    def prompt_seconds(self, card: Card, sharing: Sharing, parts: int) -> float:
        """Modelled time for a prompt, as if nothing were computed while keys and values are passed on.

        Args:
            parts: Over how many cards the weights are sharded.
        """
        spread = parts * sharing.of_tokens
        there_and_back = 2 * send_seconds(card, self.heads / 2, spread) if sharing.sp > 1 else 0.0
        return there_and_back + (sharing.cp - 1) * send_seconds(card, self.passed, spread)

    def token_seconds(self, card: Card, sharing: Sharing, parts: int) -> float:
        """The same for a later token."""
        return all_reduce_seconds(card, self.joined, sharing.of_tokens, parts * sharing.of_tokens)


def exchanged(model: Any, layout: Layout, parts: int, sharing: Sharing, length: int, rows: int) -> Exchanged:
    """What attention exchanges.

    Args:
        model: Whole, on the meta device.
        parts: Over how many processes the weights are sharded.
        length, rows: Tokens of a prompt, and sequences of a replica.

    Raises:
        ParallelError: The heads of a process cannot be shared by ``sharing.sp``.
    """
    text = model.config.get_text_config()
    heads, kv_heads, key_dim, value_dim = _heads(text, layout)
    heads, kv_heads = max(1, heads // parts), max(1, kv_heads // parts)
    # As many as go to a process are needed there, some by several.
    kv_there = len(HeadShards.of(heads, kv_heads, sharing.sp).key_value[0])
    there = heads // sharing.sp
    of_token = there * key_dim + kv_there * (key_dim + value_dim) + there * value_dim
    itemsize = model.dtype.itemsize
    own = rows * sharing.tokens(length)
    return Exchanged(
        heads=own * of_token * (sharing.sp - 1) * itemsize,
        passed=own * sharing.sp * kv_there * (key_dim + value_dim) * itemsize if sharing.cp > 1 else 0,
        joined=sharing.of_tokens * rows * heads * (value_dim + _LOGARITHM) * _FP32
        if sharing.of_tokens > 1
        else 0,
    )


def _heads(text: Any, layout: Layout) -> tuple[int, int, int, int]:
    """Heads of queries, and of keys and values; size of a key, of a value."""
    heads = text.num_attention_heads
    if getattr(text, "kv_lora_rank", None):
        return heads, heads, text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim
    found = {need.units for need in layout.requirements if need.what == "heads of keys and values"}
    kv_heads = found.pop() if len(found) == 1 else getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return heads, kv_heads, head_dim, head_dim
