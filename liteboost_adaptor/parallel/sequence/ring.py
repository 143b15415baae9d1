"""Ring attention: ranks pass keys and values on, and merge partial results."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.attention_part import joined, with_sinks
from ..runtime.groups import Group, communicate, process_group
from .token_shards import TokenShards

ops = torch.ops.liteboost


def ring_attention(
    states: tuple[Tensor, Tensor, Tensor],
    tokens: TokenShards,
    mask: Tensor | None,
    scaling: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Causal attention over this rank's keys and those of all ranks before it, which pass them on.

    Each rank receives keys and values from the one before it while it computes on those it has, and passes
    them on. Partial results are merged by their log-sum-exp.

    Args:
        states: query ``[batch, heads, tokens, dim]``, key, value; of this rank's Ulysses group.
        mask: None: causality alone. Else ``[batch or 1, heads or 1, tokens or 1, keys]``, keys up to the
            last own one; of one row, beside causality.

    Returns:
        ``[batch, tokens, heads, value_dim]``, dtype of the query.
    """
    query, key, value = states
    group = tokens.mesh.context
    own = tokens.of_ulysses_group(group.rank)
    is_causal = mask is None or mask.shape[2] < query.shape[2] or query.shape[2] == 1
    if group.rank == 0 and group.size == 1:
        return ops.attention(query, key, value, mask, scaling, is_causal, 0, softcap, sinks)
    output = lse = None
    block, held = (key, value), own
    for step in range(group.rank + 1):
        source = group.rank - step - 1
        coming = None if source < 0 else tokens.of_ulysses_group(source)
        works, received = _send_recv(block, coming, group)
        columns = None if mask is None else mask[..., held[0] : held[1]]
        part = ops.attention_part(query, *block, columns, scaling, is_causal and step == 0, softcap)
        output, lse = part if output is None else joined(output, lse, *part)
        if works:
            communicate(group, lambda works=works: [work.wait() for work in works])
        if coming is not None:
            block, held = _unflatten(received, key, value, coming[1] - coming[0]), coming
    output = output if sinks is None else with_sinks(output, lse, sinks)
    return output.to(query.dtype)


def _send_recv(
    block: tuple[Tensor, Tensor], coming: tuple[int, int] | None, group: Group
) -> tuple[list[dist.Work], Tensor | None]:
    """Start to send ``block`` to the next rank, if there is one, and to receive that of the previous rank."""
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


def _unflatten(flat: Tensor, key: Tensor, value: Tensor, length: int) -> tuple[Tensor, Tensor]:
    batch, heads = key.shape[:2]
    sizes = [batch * heads * length * dim for dim in (key.shape[3], value.shape[3])]
    parts = flat.split(sizes)
    return parts[0].view(batch, heads, length, -1), parts[1].view(batch, heads, length, -1)


def merge_over_ranks(output: Tensor, lse: Tensor, sinks: Tensor | None, group: Group) -> Tensor:
    """Merge partial results of the same queries over the keys of each rank; bit-identical on every rank.

    Args:
        output, lse: As `attention_part` gives them for this rank's keys.
    """
    # All ranks but one add zeros in a place: the all-reduce uses the shared memory of a host.
    places = output.new_zeros(group.size, *output.shape[:-1], output.shape[-1] + 1)
    places[group.rank] = torch.cat([output, lse.unsqueeze(-1)], dim=-1)
    places = torch.ops.liteboost_parallel.all_reduce(places, group.name)
    found, total = places[0, ..., :-1], places[0, ..., -1]
    for place in places[1:]:
        found, total = joined(found, total, place[..., :-1], place[..., -1])
    return found if sinks is None else with_sinks(found, total, sinks)


def causal_mask(positions: Tensor, first: int, count: int) -> Tensor:
    """``[1, 1, count, keys]``: which keys queries at positions from ``first`` on may see."""
    queries = torch.arange(first, first + count, device=positions.device)
    return (positions <= queries[:, None])[None, None]
