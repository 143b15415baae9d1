"""Integers of another format, repacked as our layers have them, none of them changed.

`linear_packed` wants groups of 32, 64 or 128 neighbouring columns, and 4 bits. Whatever else a format has is
said by the columns of the weight, which need not be those of the input in order: groups that are scattered
(``desc_act``) are brought together, short ones are filled up with weights that are zero, and integers of more
than 4 bits become two of 4, which are multiplied by the same column: ``q - z = 16 (h - zh) + (l - zl)``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...ops.quantized_linear import pack_w4
from ...setting_values import QUANT_GROUPS as GROUP_SIZES
from ..schemes import QuantScheme
from .base import CheckpointLayer


@dataclass(frozen=True)
class RepackedLayer:
    """A layer of a checkpoint as a `QuantizedLinear` has it, whose buffers it makes by their names.

    Attributes:
        layer: As the checkpoint has it.
        scheme: Of the result.
        order: For each column of the result the column of the layer, or -1 for zeros; None: as they are.
        groups: For each group of the result the one of the layer.
        is_split: Whether each integer becomes two of 4 bits.
    """

    layer: CheckpointLayer
    scheme: QuantScheme
    order: Tensor | None
    groups: Tensor
    is_split: bool

    @classmethod
    def of(cls, layer: CheckpointLayer) -> RepackedLayer:
        """Choose the scheme; reads the zero points and the list of groups of ``layer``."""
        has_zeros = layer.zero_points() is not None
        dtype = str(layer.scale_dtype).removeprefix("torch.")
        order, groups, size = _regroup(layer.groups(), layer.num_groups)
        if layer.bits > 4 and layer.num_groups == 1 and not has_zeros:
            return cls(layer, QuantScheme("w8a16", scale_dtype_name="float32"), order, groups, False)
        is_split = layer.bits > 4
        width = layer.shape[1] if order is None else len(order)
        columns = 0 if order is None and not is_split else (1 + is_split) * width
        # Of 4 bits 8 stands for zero without zero points, and the lower half of 8 bits has none.
        is_symmetric = layer.bits == 4 and not has_zeros
        name = "w4a8" if layer.config.quantizes_activations and not is_split else "w4a16"
        return cls(layer, QuantScheme(name, size, is_symmetric, dtype, columns), order, groups, is_split)

    def columns(self) -> Tensor:
        """For each column of the result that of the input."""
        order = torch.arange(self.layer.shape[1]) if self.order is None else self.order.clamp(min=0)
        return (torch.cat([order, order]) if self.is_split else order).to(torch.int32)

    def weight(self) -> Tensor:
        """The integers, packed."""
        integers = self.layer.integers()
        if self.scheme.bits == 8:
            return (integers.to(torch.int16) - (1 << (self.layer.bits - 1))).to(torch.int8)
        if self.order is not None:
            integers = integers.index_select(1, self.order.clamp(min=0))
            if (self.order < 0).any():
                blank = self._group_zeros().repeat_interleave(self.scheme.group_size, dim=1)
                integers = torch.where(self.order < 0, blank, integers)
        if self.is_split:
            integers = torch.cat([integers >> 4, integers & 15], dim=1)
        return pack_w4(integers)

    def _group_zeros(self) -> Tensor:
        """The zero point of each group of the result, unsigned, as the format has it."""
        zeros = self.layer.zero_points()
        if zeros is None:
            shape = self.layer.shape[0], len(self.groups)
            return torch.full(shape, 1 << (self.layer.bits - 1), dtype=torch.uint8)
        return zeros.index_select(1, self.groups)

    def scales(self) -> Tensor:
        """The scales of the groups of the result."""
        scales = self.layer.scales()
        if self.scheme.bits == 8:
            return scales[:, 0].to(torch.float32)
        scales = scales.index_select(1, self.groups)
        if not self.is_split:
            return scales.contiguous()
        if not torch.isfinite(scales * 16).all():
            raise self.layer.fault(
                f"{self.layer.scales_suffix} of 8 bits that are too large to be kept in two halves"
            )
        return torch.cat([scales * 16, scales], dim=1)

    def zero_points(self) -> Tensor:
        """The zero points of the groups of the result."""
        zeros = self._group_zeros()
        return torch.cat([zeros >> 4, zeros & 15], dim=1) if self.is_split else zeros.contiguous()


def _regroup(groups: Tensor, count: int) -> tuple[Tensor | None, Tensor, int]:
    """How columns of these ``groups`` (0 to ``count - 1``, in any order) become neighbours.

    Returns:
        The order of the columns and the groups as `RepackedLayer` has them, and the group size.
    """
    counts = torch.bincount(groups, minlength=count)
    size = next((each for each in sorted(GROUP_SIZES, reverse=True) if not (counts % each).any()), 0)
    order = torch.argsort(groups, stable=True)
    if not size:
        size = min(GROUP_SIZES)
        parts = order.split(counts.tolist())
        filled = [torch.nn.functional.pad(part, (0, -len(part) % size), value=-1) for part in parts]
        order, counts = torch.cat(filled), torch.tensor([len(part) for part in filled])
    regrouped = torch.repeat_interleave(torch.arange(count), counts // size)
    is_in_order = len(order) == len(groups) and torch.equal(order, torch.arange(len(order)))
    return None if is_in_order else order, regrouped, size
