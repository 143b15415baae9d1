"""How a tensor is sharded along one dimension.

`DimSharding` is what a layout decides, for any world size. `ShardSpec` is the same for a given world size:
the ranges of each rank, by which tensors are read, sharded and put together again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...checkpoint.files import LazyTensor, Slice

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Segment:
    """Consecutive elements of one dimension: ``units`` equal runs, each of which stays on one rank.

    Ranks hold the same number of units, give or take one. With fewer units than ranks, neighboring ranks hold
    the same unit.
    """

    size: int
    units: int

    def span(self, rank: int, world_size: int) -> tuple[int, int]:
        """The range ``[first, last)`` of ``rank``."""
        width = self.size // self.units
        first = self.units * rank // world_size
        last = first + 1 if self.units < world_size else self.units * (rank + 1) // world_size
        return first * width, last * width


@dataclass(frozen=True)
class DimSharding:
    """How one dimension of a parameter is sharded, segment by segment.

    A fused projection of 8 query heads and 2 KV heads of 4 elements is ``(Segment(32, 8), Segment(8, 2),
    Segment(8, 2))``: of 2 ranks, rank 0 holds rows (0, 16), (32, 36), (40, 44) and rank 1 (16, 32), (36, 40),
    (44, 48).
    """

    dim: int
    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        """Length of the unsharded dimension."""
        return sum(segment.size for segment in self.segments)

    def ranges(self, rank: int, world_size: int) -> list[tuple[int, int]]:
        """The ranges ``[first, last)`` of ``rank``, in order; adjacent ones are merged."""
        found: list[tuple[int, int]] = []
        start = 0
        for segment in self.segments:
            first, last = segment.span(rank, world_size)
            if found and found[-1][1] == start + first:
                found[-1] = (found[-1][0], start + last)
            elif last > first:
                found.append((start + first, start + last))
            start += segment.size
        return found

    def length(self, rank: int, world_size: int) -> int:
        """Length of the dimension on ``rank``."""
        return sum(last - first for first, last in self.ranges(rank, world_size))

    def spec(self, world_size: int) -> ShardSpec:
        """The ranges of all ranks."""
        ranges = tuple(tuple(self.ranges(rank, world_size)) for rank in range(world_size))
        return ShardSpec(self.dim, self.size, ranges)


@dataclass(frozen=True)
class ShardSpec:
    """How one dimension of a tensor is sharded over a given number of ranks.

    Attributes:
        size: Length of the unsharded dimension, repeats included.
        ranges: The ranges ``[first, last)`` of each rank, in order.
        repeats: How many neighbors are copies of one element of the saved tensor. Where a shard boundary lies
            within a quantization group, the group's scale is held once for each of the smaller groups.
    """

    dim: int
    size: int
    ranges: tuple[Ranges, ...]
    repeats: int = 1

    def local_shape(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Shape of the shard of ``rank``; ``shape`` is that of the unsharded tensor, or of any shard."""
        length = sum(last - first for first, last in self.ranges[rank])
        return (*shape[: self.dim], length, *shape[self.dim + 1 :])

    def global_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the saved tensor; ``shape`` is that of a shard."""
        return (*shape[: self.dim], self.size // self.repeats, *shape[self.dim + 1 :])

    def local(self, tensor: Tensor, rank: int) -> Tensor:
        """The shard of ``rank``, copied from the unsharded ``tensor``."""
        if self.repeats > 1:
            tensor = tensor.repeat_interleave(self.repeats, dim=self.dim)
        spans = self.ranges[rank] or ((0, 0),)
        return torch.cat(
            [tensor.narrow(self.dim, first, last - first) for first, last in spans], dim=self.dim
        )

    def read(self, tensor: Slice | LazyTensor, rank: int, checks: bool = True) -> Slice | LazyTensor:
        """What ``rank`` reads of ``tensor``; of a file, its shard only.

        Args:
            checks: Whether the unsharded tensor is compared with its checksum, if it has one.
        """
        if self.repeats == 1 and self.ranges[rank] == ((0, self.size),):
            return tensor  # which has its own checksum
        if isinstance(tensor, Slice) and self.repeats == 1:
            whole = tensor.digest if checks else ""
            return replace(tensor, dim=self.dim, ranges=self.ranges[rank], digest="", whole=whole)
        shape = self.local_shape(tuple(tensor.get_shape()), rank)
        return LazyTensor(shape, tensor.dtype, lambda: self.local(tensor[...], rank))

    def empty_global(self, local: Tensor) -> Tensor:
        """Memory for the shards of all ranks, of which ``local`` is one."""
        shape = tuple(local.shape)
        return torch.empty((*shape[: self.dim], self.size, *shape[self.dim + 1 :]), dtype=local.dtype)

    def without_repeats(self, tensor: Tensor) -> Tensor:
        """The saved tensor; ``tensor`` has the shards of all ranks."""
        if self.repeats == 1:
            return tensor
        return tensor.index_select(self.dim, torch.arange(0, self.size, self.repeats))


def copy_shard(target: Tensor, shard: Tensor, dim: int, spans: Iterable[Sequence[int]]) -> None:
    """Copy a rank's ``shard`` to its ranges ``spans`` of dimension ``dim`` of ``target``."""
    first = 0
    for start, last in spans:
        target.narrow(dim, start, last - start).copy_(shard.narrow(dim, first, last - start))
        first += last - start
