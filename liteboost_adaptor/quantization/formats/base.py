"""The interface of checkpoint formats, and what their layers have in common.

The layers of every format are read to the same: unsigned integers ``[out, in]``, a scale and a zero point
for each output and group, and the group of each column. A weight is ``scale * (integer - zero_point)``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ...checkpoint.files import Slice
from ...errors import QuantizationError
from .config_values import Config, LayerConfig

Tensors = Mapping[str, Slice]
#: ``(out, in)``.
Shape = tuple[int, int]
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class CheckpointFormat(ABC):
    """A format of another library: which layers of a checkpoint are quantized, and how to read them.

    Attributes:
        method: Its ``quant_method`` in configurations.
        suffixes: Of the tensors that belong to quantized layers, and are not read otherwise.
        markers: Those of them by which a quantized layer is known, also one that is not whole.
    """

    method: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    markers: ClassVar[tuple[str, ...]]

    @abstractmethod
    def __init__(self, config: Config) -> None:
        """Raises `QuantizationError` where a value of ``config`` is not of the format."""

    @staticmethod
    @abstractmethod
    def why_unsupported(config: Config, version: str) -> str:
        """Why a checkpoint with this configuration, in this version of the format, is not read, or empty."""

    def layer_names(self, tensors: Tensors) -> Iterator[str]:
        """The quantized layers, by the names of the checkpoint."""
        split = (name.rpartition(".") for name in tensors)
        return iter(dict.fromkeys(layer for layer, _, suffix in split if suffix in self.markers))

    @abstractmethod
    def layer(self, name: str, target: str, tensors: Tensors, wanted: Shape | None) -> CheckpointLayer:
        """One of them, which is ``target`` in the model, with the shape that is ``wanted`` there."""


class CheckpointLayer(ABC):
    """One quantized layer of a checkpoint.

    A tensor that is missing, or is not what the configuration says, is a `QuantizationError`.

    Attributes:
        config: What the configuration says of it.
        bits: Of an integer.
        shape: ``(out, in)``.
        num_groups: Groups of an output.
        scale_dtype: As it is in the file.
        scales_suffix: The name of the tensor of scales.
        index_suffix: That of the list with the group of each column.
        index_setting: What the configuration says where there is one.
    """

    shape: Shape
    num_groups: int
    scale_dtype: torch.dtype
    scales_suffix: ClassVar[str] = "scales"
    index_suffix: ClassVar[str] = ""
    index_setting: ClassVar[str] = ""

    def __init__(self, name: str, tensors: Tensors, config: LayerConfig) -> None:
        self.name, self.tensors, self.config = name, tensors, config
        self.bits = config.bits

    @abstractmethod
    def integers(self) -> Tensor:
        """uint8 ``[out, in]``."""

    @abstractmethod
    def raw_scales(self) -> Tensor:
        """``[out, groups]``, unchecked."""

    @abstractmethod
    def raw_zero_points(self) -> Tensor | None:
        """uint8 ``[out, groups]``; None: the middle of the range."""

    def set_shape(self, shape: Shape, wanted: Shape | None) -> None:
        """Note the shape that the integers have."""
        self.shape, self.num_groups = shape, self.config.num_groups(shape[1])
        if wanted and shape != wanted:
            raise self.fault(f"the shape {list(shape)}, and the model wants {list(wanted)}")

    def read(self, suffix: str) -> Tensor:
        """A tensor of the layer."""
        return self.slice(suffix)[...]

    def slice(self, suffix: str) -> Slice:
        """A tensor of the layer, unread."""
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

    def matrix_shape(self, suffix: str, dtype: torch.dtype = torch.int32) -> tuple[int, int]:
        """Rows and columns of a tensor of integers."""
        found = self.slice(suffix)
        if found.dtype != dtype or len(found.shape) != 2 or not all(found.shape):
            raise self.fault(f"{suffix} {list(found.shape)} of {found.dtype}, wanted a matrix of {dtype}")
        return found.shape[0], found.shape[1]

    def expect(self, suffix: str, dtypes: Sequence[torch.dtype], *shapes: tuple[int, ...]) -> torch.dtype:
        """The dtype of a tensor, one of ``dtypes``, whose shape is one of ``shapes``."""
        found = self.slice(suffix)
        if found.dtype not in dtypes or found.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            kinds = " or ".join(str(dtype) for dtype in dtypes)
            what = f"that is no list of {self.num_groups} groups, " if suffix == self.index_suffix else ""
            raise self.fault(
                f"{suffix} {list(found.shape)} of {found.dtype}, {what}wanted {wanted} of {kinds} for a "
                f"weight {list(self.shape)} with {self.bits} bits in groups of "
                f"{self.config.group_size or self.shape[1]}, as quantization_config says"
            )
        return found.dtype

    def check_group_index(self) -> None:
        """Raise `QuantizationError` unless the list of groups is there where the configuration says so."""
        if self.has(self.index_suffix):
            self.expect(self.index_suffix, (torch.int32, torch.int64), (self.shape[1],))
        elif self.config.has_group_index and self.num_groups > 1:
            raise self.fault(f"no {self.index_suffix} where quantization_config says {self.index_setting}")

    def zero_points(self) -> Tensor | None:
        """uint8 ``[out, groups]``; None where all are the middle of the range."""
        zeros = self.raw_zero_points()
        return None if zeros is None or bool((zeros == 1 << (self.bits - 1)).all()) else zeros

    def scales(self) -> Tensor:
        """``[out, groups]``."""
        scales, suffix = self.raw_scales(), self.scales_suffix
        if not torch.isfinite(scales).all():
            raise self.fault(f"{suffix} with values that are infinite or not a number")
        may_be_negative = self.config.may_be_negative and self.config.symmetric is not False
        if not may_be_negative and bool((scales < 0).any()):
            raise self.fault(
                f"{suffix} with {int((scales < 0).sum())} negative values, which only AutoRound writes, for "
                "symmetric weights, and says so in quantization_config"
            )
        if not scales.all():
            self._check_zero_scales(scales == 0)
        return scales

    def _check_zero_scales(self, is_zero: Tensor) -> None:
        """A group of zeros may have lost its scale; its integers then all say the same."""
        rows = is_zero.any(dim=1).nonzero()[:, 0]
        integers = self.integers()[rows].to(torch.int16)
        groups = self.groups().expand(len(rows), -1)
        empty = integers.new_zeros(len(rows), self.num_groups)
        least, most = (
            empty.scatter_reduce(1, groups, integers, reduce, include_self=False)
            for reduce in ("amin", "amax")
        )
        wrong = is_zero[rows] & (least != most)
        if wrong.any():
            raise self.fault(
                f"{self.scales_suffix} that are zero for {int(wrong.sum())} groups of integers that differ"
            )

    def groups(self) -> Tensor:
        """The group of each column, int64 ``[in]``."""
        if self.index_suffix and self.has(self.index_suffix):
            return self._listed_groups(self.index_suffix)
        if self.shape[1] % self.num_groups or self.shape[1] % (self.config.group_size or 1):
            raise self.fault(
                f"{self.shape[1]} columns in {self.num_groups} groups, where quantization_config says "
                f"group_size = {self.config.group_size} and nothing lists the columns of each",
                self.scales_suffix,
            )
        return self._groups_in_order()

    def _groups_in_order(self) -> Tensor:
        return torch.arange(self.shape[1]) // (self.config.group_size or self.shape[1])

    def _listed_groups(self, suffix: str) -> Tensor:
        """The same, as a tensor lists them."""
        found, size = self.read(suffix).to(torch.int64), self.config.group_size or self.shape[1]
        in_order = self._groups_in_order()
        if not bool(((found >= 0) & (found < self.num_groups)).all()) or not torch.equal(
            found.bincount(minlength=self.num_groups), in_order.bincount(minlength=self.num_groups)
        ):
            raise self.fault(
                f"{suffix} {list(found.shape)} that is no list of {self.num_groups} groups of {size}, as "
                "quantization_config says"
            )
        if self.config.has_group_index is False and not torch.equal(found, in_order):
            raise self.fault(
                f"{suffix} with columns in another order, where quantization_config says that there is none"
            )
        return found

    def fault(self, found: str, suffix: str = "") -> QuantizationError:
        """An error that names the layer and a file: with this tensor, or that which ``found`` begins with."""
        return QuantizationError(
            f"{self.name} of the checkpoint has {found}; it is not what the format says. Copy "
            f"{self._file(suffix or found.split()[0].rstrip(','))} and config.json again, or quantize the "
            "model again"
        )

    def _file(self, suffix: str) -> str:
        prefix = f"{self.name}."
        names = [prefix + suffix, *(name for name in self.tensors if name.startswith(prefix))]
        return next(
            (str(self.tensors[name].file.path) for name in names if name in self.tensors), "the files"
        )

    def dequantize(self) -> Tensor:
        """The weight, fp32 ``[out, in]``."""
        groups, zeros = self.groups(), self.zero_points()
        integers = self.integers().float()
        integers -= 1 << (self.bits - 1) if zeros is None else zeros.float().index_select(1, groups)
        return integers.mul_(self.scales().float().index_select(1, groups))


def unpack_int32(words: Tensor, bits: int) -> Tensor:
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
