"""A quantised layer as a checkpoint of another format has it: its tensors, read and compared."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..checkpoint.files import Slice
from ..errors import QuantizationError
from .stated import Stated

Tensors = Mapping[str, Slice]
#: ``(out, in)``.
Shape = tuple[int, int]
#: What scales may be.
SCALES = (torch.float16, torch.bfloat16, torch.float32)


class StoredLayer(ABC):
    """One layer of a checkpoint.

    Attributes:
        stated: What the configuration says of it.
        bits: Of an integer.
        shape: ``(out, in)``.
        group_count: Groups of an output.
        scale_dtype: As they are stored.
        scales_suffix: The name of their tensor.
    """

    shape: Shape
    group_count: int
    scale_dtype: torch.dtype
    scales_suffix: str

    def __init__(self, name: str, tensors: Tensors, stated: Stated) -> None:
        self.name, self.tensors, self.stated = name, tensors, stated
        self.bits = stated.bits

    def take_shape(self, shape: Shape, wanted: Shape | None) -> None:
        """Note the shape that the integers have.

        Raises:
            QuantizationError: The model wants another.
        """
        self.shape, self.group_count = shape, self.stated.groups_of(shape[1])
        if wanted and shape != wanted:
            raise self.fault(f"the shape {list(shape)}, and the model wants {list(wanted)}", "")

    def part(self, suffix: str) -> Tensor:
        """A tensor of the layer, read."""
        return self.slice(suffix)[...]

    def slice(self, suffix: str) -> Slice:
        """A tensor of the layer.

        Raises:
            QuantizationError: It is not there.
        """
        name = f"{self.name}.{suffix}"
        if name not in self.tensors:
            raise QuantizationError(
                f"the checkpoint has no {name}, beside other parts of that layer in {self._file(suffix)}; "
                "complete it"
            )
        return self.tensors[name]

    def has(self, suffix: str) -> bool:
        """Whether there is such a tensor, with anything in it."""
        found = self.tensors.get(f"{self.name}.{suffix}")
        return found is not None and math.prod(found.shape) > 0

    def matrix(self, suffix: str, dtype: torch.dtype = torch.int32) -> tuple[int, int]:
        """Rows and columns of a tensor of integers.

        Raises:
            QuantizationError: It is none.
        """
        found = self.slice(suffix)
        if found.dtype != dtype or len(found.shape) != 2 or not all(found.shape):
            raise self.fault(
                f"{suffix} {list(found.shape)} of {found.dtype}, wanted a matrix of {dtype}", suffix
            )
        return found.shape[0], found.shape[1]

    def expect(self, suffix: str, dtypes: Sequence[torch.dtype], *shapes: tuple[int, ...]) -> torch.dtype:
        """The dtype of a tensor, one of ``dtypes``, whose shape is one of ``shapes``.

        Raises:
            QuantizationError: It is not there, or another.
        """
        found = self.slice(suffix)
        if found.dtype not in dtypes or found.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            kinds = " or ".join(str(dtype) for dtype in dtypes)
            what = f"that is no list of {self.group_count} groups, " if "g_idx" in suffix else ""
            raise self.fault(
                f"{suffix} {list(found.shape)} of {found.dtype}, {what}wanted {wanted} of {kinds} for a "
                f"weight {list(self.shape)} with {self.bits} bits in groups of "
                f"{self.stated.group_size or self.shape[1]}, as quantization_config says",
                suffix,
            )
        return found.dtype

    @abstractmethod
    def integers(self) -> Tensor:
        """uint8 ``[out, in]``."""

    @abstractmethod
    def stored_scales(self) -> Tensor:
        """``[out, groups]``, as they are stored."""

    @abstractmethod
    def stored_zeros(self) -> Tensor | None:
        """uint8 ``[out, groups]``; None: the middle of the range."""

    def zeros(self) -> Tensor | None:
        """uint8 ``[out, groups]``; None where all are the middle of the range."""
        found = self.stored_zeros()
        return None if found is None or bool((found == 1 << (self.bits - 1)).all()) else found

    def scales(self) -> Tensor:
        """``[out, groups]``.

        Raises:
            QuantizationError: They cannot be what integers are multiplied by.
        """
        found, suffix = self.stored_scales(), self.scales_suffix
        if not torch.isfinite(found).all():
            raise self.fault(f"{suffix} with values that are infinite or not a number", suffix)
        may_be_negative = self.stated.may_be_negative and self.stated.symmetric is not False
        if not may_be_negative and bool((found < 0).any()):
            raise self.fault(
                f"{suffix} with {int((found < 0).sum())} negative values, which only AutoRound writes, for "
                "symmetric weights, and says so in quantization_config",
                suffix,
            )
        if not found.all():
            self._check_zero_scales(found == 0)
        return found

    def _check_zero_scales(self, is_zero: Tensor) -> None:
        """A group of zeros may have lost its scale; its integers then all say the same."""
        rows = is_zero.any(dim=1).nonzero()[:, 0]
        integers = self.integers()[rows].to(torch.int16)
        groups = self.groups().expand(len(rows), -1)
        ends = [
            integers.new_zeros(len(rows), self.group_count).scatter_reduce_(
                1, groups, integers, reduce, include_self=False
            )
            for reduce in ("amin", "amax")
        ]
        wrong = is_zero[rows] & (ends[0] != ends[1])
        if wrong.any():
            raise self.fault(
                f"{self.scales_suffix} that are zero for {int(wrong.sum())} groups of integers that differ",
                self.scales_suffix,
            )

    def groups(self) -> Tensor:
        """The group of each column, int64 ``[in]``."""
        if self.shape[1] % self.group_count or self.shape[1] % (self.stated.group_size or 1):
            raise self.fault(
                f"{self.shape[1]} columns in {self.group_count} groups, where quantization_config says "
                f"group_size = {self.stated.group_size} and nothing lists the columns of each",
                self.scales_suffix,
            )
        return self._in_order()

    def _in_order(self) -> Tensor:
        return torch.arange(self.shape[1]) // (self.stated.group_size or self.shape[1])

    def listed_groups(self, suffix: str) -> Tensor:
        """The same, as a tensor lists them.

        Raises:
            QuantizationError: It lists others, or not as many columns of each as it has.
        """
        found, size = self.part(suffix).to(torch.int64), self.stated.group_size or self.shape[1]
        in_order = self._in_order()
        if not bool(((found >= 0) & (found < self.group_count)).all()) or not torch.equal(
            found.bincount(minlength=self.group_count), in_order.bincount(minlength=self.group_count)
        ):
            raise self.fault(
                f"{suffix} {list(found.shape)} that is no list of {self.group_count} groups of {size}, as "
                "quantization_config says",
                suffix,
            )
        if self.stated.is_listed is False and not torch.equal(found, in_order):
            raise self.fault(
                f"{suffix} with columns in another order, where quantization_config says that there is none",
                suffix,
            )
        return found

    def fault(self, found: str, suffix: str) -> QuantizationError:
        """An error that names the layer, and the file with this part of it."""
        return QuantizationError(
            f"{self.name} of the checkpoint has {found}; it is not what the format says. Copy "
            f"{self._file(suffix)} and config.json again, or quantise the model again"
        )

    def _file(self, suffix: str) -> str:
        names = [
            f"{self.name}.{suffix}",
            *(name for name in self.tensors if name.startswith(f"{self.name}.")),
        ]
        return next(
            (str(self.tensors[name].file.path) for name in names if name in self.tensors), "the files"
        )

    def dequantized(self) -> Tensor:
        """The weight, fp32 ``[out, in]``."""
        groups = self.groups()
        zeros = self.zeros()
        middle = 1 << (self.bits - 1)
        integers = self.integers().float()
        integers -= middle if zeros is None else zeros.float().index_select(1, groups)
        return integers.mul_(self.scales().float().index_select(1, groups))


def unpack(words: Tensor, bits: int) -> Tensor:
    """uint8 ``[rows, words * 32 / bits]`` from int32 ``[rows, words]``: a stream of bits, lowest first."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    if bits == 4:
        return torch.stack([octets & 15, octets >> 4], dim=-1).reshape(len(words), -1)
    stream = octets[..., None] >> torch.arange(8, dtype=torch.uint8) & 1
    stream = stream.reshape(len(words), -1)
    parts = stream[:, : stream.shape[1] // bits * bits].reshape(len(words), -1, bits)
    return (parts << torch.arange(bits, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)
