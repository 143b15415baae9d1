"""Which tokens of a prompt each rank holds, and how what ranks have computed for theirs is gathered."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..runtime.groups import Group, communicate, process_group
from ..runtime.mesh import Mesh


@dataclass(frozen=True)
class TokenShards:
    """Contiguous shards of a prompt's tokens, as even as possible, in the order of the ranks."""

    mesh: Mesh
    length: int

    def bound(self, place: int) -> int:
        """First token of the rank at ``place``; behind the last rank, the length."""
        size = self.mesh.sequence.size
        return place * (self.length // size) + min(place, self.length % size)

    @property
    def own(self) -> tuple[int, int]:
        """The range ``[first, last)`` of this rank."""
        place = self.mesh.sequence.rank
        return self.bound(place), self.bound(place + 1)

    def of_ulysses_group(self, context_rank: int) -> tuple[int, int]:
        """The range of a Ulysses group."""
        size = self.mesh.heads.size
        return self.bound(context_rank * size), self.bound((context_rank + 1) * size)

    @property
    def ulysses_lengths(self) -> list[int]:
        """Numbers of tokens of the ranks in this rank's Ulysses group."""
        first = self.mesh.context.rank * self.mesh.heads.size
        places = range(first, first + self.mesh.heads.size)
        return [self.bound(place + 1) - self.bound(place) for place in places]


def all_gather_tokens(tensor: Tensor, lengths: list[int], group: Group) -> Tensor:
    """``[batch, sum(lengths), ...]`` of each rank's ``[batch, lengths[rank], ...]``."""
    longest = max(lengths)
    padded = tensor.new_zeros(tensor.shape[0], longest, *tensor.shape[2:])
    padded[:, : tensor.shape[1]] = tensor
    parts = [torch.empty_like(padded) for _ in lengths]
    communicate(group, lambda: dist.all_gather(parts, padded, group=process_group(group)))
    return torch.cat([part[:, :length] for part, length in zip(parts, lengths, strict=True)], dim=1)


def broadcast_from_last(tensor: Tensor, group: Group) -> Tensor:
    """The last rank's ``tensor``, whose shape is the same on every rank."""
    result = tensor.contiguous()
    last = group.size - 1
    communicate(group, lambda: dist.broadcast(result, group_src=last, group=process_group(group)))
    return result
