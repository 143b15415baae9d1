"""Integers of another format, arranged as our layers keep them, none of them changed.

`linear_w4` wants groups of 32, 64 or 128 neighbouring columns, and 4 bits. Whatever else a format has is said
by the columns of the weight, which need not be those of ``x`` in order: groups that are scattered
(``desc_act``) are brought together, short ones are filled up with weights that are zero, and integers of more
than 4 bits become two of 4, which are multiplied by the same column: ``q - z = 16 (h - zh) + (l - zl)``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..config import QUANT_GROUPS as GROUP_SIZES
from ..errors import QuantizationError
from ..ops.quantized_linear import pack_w4
from .schemes import Scheme

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PACKED = min(GROUP_SIZES)


@dataclass(frozen=True)
class Stored(Scheme):
    """How a layer of another format is kept.

    Attributes:
        scales: Name of the dtype of its scales.
        columns: How many columns the weight has, where they are not those of ``x`` in order; else 0.
    """

    scales: str = "float32"
    columns: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.scales, str) or self.scales not in _DTYPES:
            raise QuantizationError(f"scales must be of one of {', '.join(_DTYPES)}, got {self.scales!r}")
        if type(self.columns) is not int or self.columns < 0 or (self.columns and self.bits == 8):
            raise QuantizationError(f"columns must be a number of columns, of w4a16, got {self.columns!r}")

    @property
    def scale_dtype(self) -> torch.dtype:
        return _DTYPES[self.scales]

    def unsuited(self, outputs: int, inputs: int) -> str:
        return super().unsuited(outputs, self.columns or inputs)

    def shapes(self, outputs: int, inputs: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        found = super().shapes(outputs, self.columns or inputs)
        return {**found, "columns": ((self.columns,), torch.int32)} if self.columns else found

    def to_dict(self) -> dict[str, Any]:
        """As a configuration says it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> Stored:
        """What `to_dict` wrote.

        Raises:
            QuantizationError: It is something else.
        """
        known = {each.name for each in fields(cls)}
        if not isinstance(values, dict) or not set(values) <= known or "name" not in values:
            raise QuantizationError(f"a layer must be given by {', '.join(sorted(known))}, got {values!r}")
        return cls(**values)


@dataclass(frozen=True)
class Arrangement:
    """Where the columns of a weight go.

    Attributes:
        order: For each column of what is kept the column of the weight, or -1 for zeros; None: as it is.
        groups: For each of our groups the one of the format.
        size: Columns of ours.
    """

    order: Tensor | None
    groups: Tensor
    size: int


def arrange(groups: Tensor, count: int) -> Arrangement:
    """How columns of these ``groups`` (0 to ``count - 1``, in any order) become neighbours."""
    counts = torch.bincount(groups, minlength=count)
    size = next((each for each in sorted(GROUP_SIZES, reverse=True) if not (counts % each).any()), 0)
    order = torch.argsort(groups, stable=True)
    if not size:
        size = _PACKED
        parts = order.split(counts.tolist())
        filled = [torch.nn.functional.pad(part, (0, -len(part) % size), value=-1) for part in parts]
        order, counts = torch.cat(filled), torch.tensor([len(part) for part in filled])
    found = torch.repeat_interleave(torch.arange(count), counts // size)
    is_plain = len(order) == len(groups) and torch.equal(order, torch.arange(len(order)))
    return Arrangement(None if is_plain else order, found, size)


@dataclass(frozen=True)
class Form:
    """How one layer is kept: its scheme, and what its columns are."""

    scheme: Stored
    arrangement: Arrangement
    is_split: bool

    @classmethod
    def of(cls, bits: int, groups: Tensor, count: int, has_zeros: bool, scales: torch.dtype) -> Form:
        """For integers of ``bits``; ``groups`` says which of ``count`` a column is in.

        Args:
            has_zeros: Whether another integer than ``2 ** (bits - 1)`` stands for zero.
        """
        dtype = str(scales).removeprefix("torch.")
        found = arrange(groups, count)
        if bits > 4 and count == 1 and not has_zeros:
            return cls(Stored("w8a16", scales="float32"), found, False)
        is_split = bits > 4
        width = len(groups) if found.order is None else len(found.order)
        columns = 0 if found.order is None and not is_split else (1 + is_split) * width
        # Of 4 bits 8 stands for zero without zero points, and the lower half of 8 bits has none.
        is_symmetric = bits == 4 and not has_zeros
        return cls(Stored("w4a16", found.size, is_symmetric, dtype, columns), found, is_split)

    def columns(self, inputs: int) -> Tensor:
        """The buffer of that name: int32."""
        order = self.arrangement.order
        order = torch.arange(inputs) if order is None else order.clamp(min=0)
        return (torch.cat([order, order]) if self.is_split else order).to(torch.int32)

    def weight(self, integers: Tensor, zeros: Tensor | None, bits: int) -> Tensor:
        """Packed, from ``integers`` ``[out, in]`` and ``zeros`` ``[out, groups]`` of the format, uint8."""
        if self.scheme.bits == 8:
            return (integers.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)
        order = self.arrangement.order
        if order is not None:
            integers = integers.index_select(1, order.clamp(min=0))
            if (order < 0).any():
                blank = self._zeros(zeros, integers, bits).repeat_interleave(self.scheme.group_size, dim=1)
                integers = torch.where(order < 0, blank, integers)
        if self.is_split:
            integers = torch.cat([integers >> 4, integers & 15], dim=1)
        return pack_w4(integers)

    def _zeros(self, zeros: Tensor | None, like: Tensor, bits: int) -> Tensor:
        """Of each of our groups, as the format has it."""
        if zeros is None:
            return like.new_full((len(like), len(self.arrangement.groups)), 1 << (bits - 1))
        return zeros.index_select(1, self.arrangement.groups)

    def scales(self, scales: Tensor) -> Tensor:
        """Of our groups, from ``[out, groups]`` of the format."""
        if self.scheme.bits == 8:
            return scales[:, 0].to(torch.float32)
        found = scales.index_select(1, self.arrangement.groups)
        if not self.is_split:
            return found.contiguous()
        if not torch.isfinite(found * 16).all():
            raise OverflowError("of 8 bits that are too large to be kept in two halves")
        return torch.cat([found * 16, found], dim=1)

    def zero_points(self, zeros: Tensor | None, outputs: int, bits: int) -> Tensor:
        """Of our groups, from ``[out, groups]`` uint8 of the format, or None where all are the middle."""
        found = self._zeros(zeros, torch.empty(outputs, 0, dtype=torch.uint8), bits)
        return torch.cat([found >> 4, found & 15], dim=1) if self.is_split else found.contiguous()
