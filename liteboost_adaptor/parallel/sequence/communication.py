"""What ranks that share a prompt exchange for attention: heads, keys and values, partial results."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ParallelError
from ...ops.attention_part import joined, with_sinks
from ..runtime.groups import Group, process_group, talk
from ..runtime.mesh import Mesh

ops = torch.ops.liteboost


@dataclass(frozen=True)
class Tokens:
    """Which tokens of a prompt the ranks of a mesh hold, in their order, as evenly as can be."""

    mesh: Mesh
    length: int

    def bound(self, place: int) -> int:
        """The first token of the rank at ``place``; of one behind the last, the length."""
        size = self.mesh.sequence.size
        return place * (self.length // size) + min(place, self.length % size)

    @property
    def own(self) -> tuple[int, int]:
        """First token of this rank, and the one behind its last."""
        place = self.mesh.sequence.rank
        return self.bound(place), self.bound(place + 1)

    def of_heads(self, context_rank: int) -> tuple[int, int]:
        """The same of all ranks together that exchange heads."""
        size = self.mesh.heads.size
        return self.bound(context_rank * size), self.bound((context_rank + 1) * size)

    @property
    def lengths_of_heads(self) -> list[int]:
        """How many tokens each rank holds that this one exchanges heads with."""
        first = self.mesh.context.rank * self.mesh.heads.size
        places = range(first, first + self.mesh.heads.size)
        return [self.bound(place + 1) - self.bound(place) for place in places]


@dataclass(frozen=True)
class Heads:
    """Which heads each rank computes, of those that share the same tokens' (Ulysses).

    Attributes:
        query: Query heads of a rank.
        key_value: For each rank, which heads of keys and values it needs for them.
    """

    query: int
    key_value: list[list[int]]

    @staticmethod
    def of(heads: int, kv_heads: int, size: int) -> Heads:
        """How ``size`` ranks share them.

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
            return Heads(each, [sorted({h // group for h in range(first, first + each)}) for first in firsts])
        # Heads of several groups, cut within a group: each query head brings its own.
        return Heads(each, [[h // group for h in range(first, first + each)] for first in firsts])


def to_heads(states: tuple[Tensor, Tensor, Tensor], tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    """Some heads of the tokens of all ranks, for all heads of this rank's tokens, in one exchange.

    Args:
        states: query ``[batch, heads, own tokens, dim]``, key, value.

    Returns:
        The same of ``[batch, some heads, tokens of all, dim]``.
    """
    query, key, value = states
    group = tokens.mesh.heads
    heads = Heads.of(query.shape[1], key.shape[1], group.size)
    sent = []
    for rank, kv_heads in enumerate(heads.key_value):
        first = rank * heads.query
        sent.append(query[:, first : first + heads.query])
        sent += [key[:, kv_heads], value[:, kv_heads]]
    sizes = [sum(part.numel() for part in sent[3 * rank : 3 * rank + 3]) for rank in range(group.size)]
    own = query.shape[2]
    lengths = tokens.lengths_of_heads
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


def from_heads(output: Tensor, tokens: Tokens) -> Tensor:
    """``[batch, own tokens, heads, dim]`` of ``[batch, tokens of all, some heads, dim]``."""
    group, lengths = tokens.mesh.heads, tokens.lengths_of_heads
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
    talk(group, lambda: dist.all_to_all_single(received, flat, wanted, sizes, group=ranks))
    return received.split(wanted)


def ring(
    states: tuple[Tensor, Tensor, Tensor],
    tokens: Tokens,
    mask: Tensor | None,
    scaling: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Causal attention over this rank's keys and those of all ranks before it, which pass them on.

    Each rank receives keys and values from the one before it while it computes on those it has, and hands
    them on; the partial results are joined by their logarithms of sums.

    Args:
        states: query ``[batch, heads, tokens, dim]``, key, value; of the tokens `Tokens.of_heads` says.
        mask: None: causality alone. Else ``[batch or 1, heads or 1, tokens or 1, keys]``, keys up to the
            last own one; of one row, beside causality.

    Returns:
        ``[batch, tokens, heads, value_dim]``, dtype of the query.
    """
    query, key, value = states
    group = tokens.mesh.context
    own = tokens.of_heads(group.rank)
    is_causal = mask is None or mask.shape[2] < query.shape[2] or query.shape[2] == 1
    if group.rank == 0 and group.size == 1:
        return ops.attention(query, key, value, mask, scaling, is_causal, 0, softcap, sinks)
    output = lse = None
    block, held = (key, value), own
    for step in range(group.rank + 1):
        source = group.rank - step - 1
        coming = None if source < 0 else tokens.of_heads(source)
        works, received = _pass_on(block, coming, group)
        columns = None if mask is None else mask[..., held[0] : held[1]]
        part = ops.attention_part(query, *block, columns, scaling, is_causal and step == 0, softcap)
        output, lse = part if output is None else joined(output, lse, *part)
        if works:
            talk(group, lambda works=works: [work.wait() for work in works])
        if coming is not None:
            block, held = _states(received, key, value, coming[1] - coming[0]), coming
    output = output if sinks is None else with_sinks(output, lse, sinks)
    return output.to(query.dtype)


def _pass_on(
    block: tuple[Tensor, Tensor], coming: tuple[int, int] | None, group: Group
) -> tuple[list[dist.Work], Tensor | None]:
    """Send ``block`` to the next rank, if there is one, and begin to receive what the one before sends."""
    key, value = block
    ranks = process_group(group)
    operations, received = [], None
    if group.rank + 1 < group.size:
        flat = torch.cat([key.reshape(-1), value.reshape(-1)])
        operations.append(dist.P2POp(dist.isend, flat, group=ranks, group_peer=group.rank + 1))
    if coming is not None:
        batch, heads = key.shape[:2]
        length = coming[1] - coming[0]
        received = key.new_empty(batch * heads * length * (key.shape[3] + value.shape[3]))
        operations.append(dist.P2POp(dist.irecv, received, group=ranks, group_peer=group.rank - 1))
    return (dist.batch_isend_irecv(operations) if operations else []), received


def _states(flat: Tensor, key: Tensor, value: Tensor, length: int) -> tuple[Tensor, Tensor]:
    batch, heads = key.shape[:2]
    sizes = [batch * heads * length * dim for dim in (key.shape[3], value.shape[3])]
    parts = flat.split(sizes)
    return parts[0].view(batch, heads, length, -1), parts[1].view(batch, heads, length, -1)


def over_all(output: Tensor, lse: Tensor, sinks: Tensor | None, group: Group) -> Tensor:
    """Partial results of the same queries over the keys of each rank, joined on every rank: the same bits.

    Args:
        output, lse: As `attention_part` gives them for this rank's keys.
    """
    # Every rank adds zeros to the others' places: sums go through memory that ranks of a host share.
    places = output.new_zeros(group.size, *output.shape[:-1], output.shape[-1] + 1)
    places[group.rank] = torch.cat([output, lse.unsqueeze(-1)], dim=-1)
    places = torch.ops.liteboost_parallel.all_reduce(places, group.name)
    found, total = places[0, ..., :-1], places[0, ..., -1]
    for place in places[1:]:
        found, total = joined(found, total, place[..., :-1], place[..., -1])
    return found if sinks is None else with_sinks(found, total, sinks)


def of_all_tokens(tensor: Tensor, lengths: list[int], group: Group) -> Tensor:
    """``[batch, sum(lengths), ...]`` of each rank's ``[batch, lengths[rank], ...]``."""
    longest = max(lengths)
    padded = tensor.new_zeros(tensor.shape[0], longest, *tensor.shape[2:])
    padded[:, : tensor.shape[1]] = tensor
    parts = [torch.empty_like(padded) for _ in lengths]
    talk(group, lambda: dist.all_gather(parts, padded, group=process_group(group)))
    return torch.cat([part[:, :length] for part, length in zip(parts, lengths, strict=True)], dim=1)


def of_last_rank(tensor: Tensor, group: Group) -> Tensor:
    """The last rank's ``tensor``, whose shape is the same on every rank."""
    result = tensor.contiguous()
    last = group.size - 1
    talk(group, lambda: dist.broadcast(result, group_src=last, group=process_group(group)))
    return result


def visible(positions: Tensor, first: int, count: int) -> Tensor:
    """``[1, 1, count, keys]``: which keys queries at positions from ``first`` on may see."""
    queries = torch.arange(first, first + count, device=positions.device)
    return (positions <= queries[:, None])[None, None]
