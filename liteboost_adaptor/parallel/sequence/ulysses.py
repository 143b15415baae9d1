"""Ulysses: ranks exchange heads for tokens before attention, and back behind it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ParallelError
from ..runtime.groups import Group, communicate, process_group
from .token_shards import TokenShards


@dataclass(frozen=True)
class HeadShards:
    """Which heads each rank of a Ulysses group computes.

    Attributes:
        query: Query heads of a rank.
        key_value: For each rank, the KV heads that it needs for them.
    """

    query: int
    key_value: list[list[int]]

    @staticmethod
    def of(heads: int, kv_heads: int, size: int) -> HeadShards:
        """How heads are shared by ``size`` ranks.

        Raises:
            ParallelError: They cannot do so evenly.
        """
        if heads % size:
            fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise ParallelError(
                f"LITEBOOST_SP={size} divides {heads} heads of queries, and they do not divide evenly. Sizes "
                f"that work: {fits}. Or share the tokens by LITEBOOST_CP, which divides no heads."
            )
        each, group = heads // size, heads // kv_heads
        firsts = range(0, heads, each)
        if kv_heads % size == 0 or group % each == 0:
            return HeadShards(
                each, [sorted({h // group for h in range(first, first + each)}) for first in firsts]
            )
        # Heads of several groups, cut within a group: each query head brings its own.
        return HeadShards(each, [[h // group for h in range(first, first + each)] for first in firsts])


def scatter_heads(
    states: tuple[Tensor, Tensor, Tensor], tokens: TokenShards
) -> tuple[Tensor, Tensor, Tensor]:
    """All-to-all from all heads of this rank's tokens to some heads of all tokens.

    Args:
        states: query ``[batch, heads, own tokens, dim]``, key, value.

    Returns:
        The same, ``[batch, some heads, tokens of all, dim]``.
    """
    query, key, value = states
    group = tokens.mesh.heads
    heads = HeadShards.of(query.shape[1], key.shape[1], group.size)
    sent = []
    for rank, kv_heads in enumerate(heads.key_value):
        first = rank * heads.query
        sent.append(query[:, first : first + heads.query])
        sent += [key[:, kv_heads], value[:, kv_heads]]
    sizes = [sum(part.numel() for part in sent[3 * rank : 3 * rank + 3]) for rank in range(group.size)]
    own = query.shape[2]
    lengths = tokens.ulysses_lengths
    received = _all_to_all(
        torch.cat([part.reshape(-1) for part in sent]),
        sizes,
        [sizes[group.rank] // own * length for length in lengths],
        group,
    )
    batch, kv_count = query.shape[0], len(heads.key_value[group.rank])
    shapes = [(heads.query, query.shape[3]), (kv_count, key.shape[3]), (kv_count, value.shape[3])]
    parts: list[list[Tensor]] = [[], [], []]
    for chunk, length in zip(received, lengths, strict=True):
        pieces = chunk.split([batch * count * length * dim for count, dim in shapes])
        for kept, piece, (count, dim) in zip(parts, pieces, shapes, strict=True):
            kept.append(piece.view(batch, count, length, dim))
    made = tuple(torch.cat(kept, dim=2) for kept in parts)
    return made[0], made[1], made[2]


def gather_heads(output: Tensor, tokens: TokenShards) -> Tensor:
    """All-to-all from ``[batch, tokens of all, some heads, dim]`` to ``[batch, own tokens, heads, dim]``."""
    group, lengths = tokens.mesh.heads, tokens.ulysses_lengths
    batch, _, count, dim = output.shape
    own = lengths[group.rank]
    parts = output.split(lengths, dim=1)
    size = batch * own * count * dim
    received = _all_to_all(
        torch.cat([part.reshape(-1) for part in parts]),
        [p.numel() for p in parts],
        [size] * len(parts),
        group,
    )
    return torch.cat([chunk.view(batch, own, count, dim) for chunk in received], dim=2)


def _all_to_all(flat: Tensor, sizes: list[int], wanted: list[int], group: Group) -> tuple[Tensor, ...]:
    received = flat.new_empty(sum(wanted))
    ranks = process_group(group)
    communicate(group, lambda: dist.all_to_all_single(received, flat, wanted, sizes, group=ranks))
    return received.split(wanted)
