"""What ranks hold of one tensor: runs of one of its dimensions, as they are read, cut and put together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...checkpoint.files import Made, Slice
from .plan import Cut

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Share:
    """How one dimension of a tensor is divided.

    Attributes:
        size: Of the whole dimension, as the ranks hold it.
        ranges: The (first, last + 1) of each rank, in order.
        repeats: How many neighbours are one element of the tensor: a scale, where ranks meet inside of its
            group, is held once for each of the smaller groups.
    """

    dim: int
    size: int
    ranges: tuple[Ranges, ...]
    repeats: int = 1

    @classmethod
    def of(cls, cut: Cut, world_size: int) -> Share:
        """Of a parameter."""
        ranges = tuple(tuple(cut.ranges(rank, world_size)) for rank in range(world_size))
        return cls(cut.dim, cut.size, ranges)

    def shape(self, other: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """What ``rank`` holds of a tensor that is, whole or in part, of shape ``other``."""
        length = sum(last - first for first, last in self.ranges[rank])
        return (*other[: self.dim], length, *other[self.dim + 1 :])

    def whole_shape(self, other: tuple[int, ...]) -> tuple[int, ...]:
        """Of the tensor that a part of shape ``other`` is of."""
        return (*other[: self.dim], self.size // self.repeats, *other[self.dim + 1 :])

    def held(self, whole: Tensor, rank: int) -> Tensor:
        """The part of ``whole`` that ``rank`` holds, in memory of its own."""
        if self.repeats > 1:
            whole = whole.repeat_interleave(self.repeats, dim=self.dim)
        spans = self.ranges[rank] or ((0, 0),)
        return torch.cat([whole.narrow(self.dim, first, last - first) for first, last in spans], dim=self.dim)

    def read(self, tensor: Slice | Made, rank: int, checks: bool = True) -> Slice | Made:
        """What ``rank`` reads of ``tensor``: of a file its part alone.

        Args:
            checks: Whether the whole tensor is compared with its checksum, if it has one.
        """
        if self.repeats == 1 and self.ranges[rank] == ((0, self.size),):
            return tensor  # which has its own checksum
        if isinstance(tensor, Slice) and self.repeats == 1:
            whole = tensor.digest if checks else ""
            return replace(tensor, dim=self.dim, ranges=self.ranges[rank], digest="", whole=whole)
        shape = self.shape(tuple(tensor.get_shape()), rank)
        return Made(shape, tensor.dtype, lambda: self.held(tensor[...], rank))

    def room(self, local: Tensor) -> Tensor:
        """Memory for what all ranks hold of a tensor; ``local`` is a rank's part."""
        shape = tuple(local.shape)
        return torch.empty((*shape[: self.dim], self.size, *shape[self.dim + 1 :]), dtype=local.dtype)

    def folded(self, held: Tensor) -> Tensor:
        """The tensor of which ``held`` is what all ranks hold."""
        if self.repeats == 1:
            return held
        return held.index_select(self.dim, torch.arange(0, self.size, self.repeats))


def put(whole: Tensor, part: Tensor, dim: int, spans: Iterable[Sequence[int]]) -> None:
    """Copy a rank's ``part`` to the ``spans`` of dimension ``dim`` that it is of."""
    first = 0
    for start, last in spans:
        whole.narrow(dim, start, last - start).copy_(part.narrow(dim, first, last - start))
        first += last - start
