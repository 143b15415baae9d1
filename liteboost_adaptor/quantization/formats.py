"""How GPTQ, AWQ and compressed-tensors keep the weight of a layer: which tensors, and where a bit is.

Each is read to the same: unsigned integers ``[out, in]``, a scale and an integer that stands for zero for
each output and group, and the group of each column. A weight is ``scale * (integer - zero)``.

Sources: AutoGPTQ's and GPTQModel's ``QuantLinear`` (``qweight`` packed along the inputs, ``qzeros`` along
the outputs, stored minus one but for ``gptq_v2``), AutoAWQ's ``WQLinear_GEMM`` (both packed along the
outputs, eight in the order 0, 2, 4, 6, 1, 3, 5, 7), compressed-tensors' ``pack-quantized`` and
``int-quantized`` compressors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.files import Slice
from ..errors import QuantizationError

Tensors = Mapping[str, Slice]


class StoredLayer(ABC):
    """One layer of a checkpoint.

    Attributes:
        bits: Of an integer.
        shape: ``(out, in)``.
        group_count: Groups of an output.
        scale_dtype: As they are stored.
    """

    bits: int
    shape: tuple[int, int]
    group_count: int
    scale_dtype: torch.dtype

    def __init__(self, name: str, tensors: Tensors) -> None:
        self.name, self.tensors = name, tensors

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
                f"the checkpoint has no {name}, beside other parts of that layer; complete it"
            )
        return self.tensors[name]

    def has(self, suffix: str) -> bool:
        """Whether there is such a tensor, with anything in it."""
        found = self.tensors.get(f"{self.name}.{suffix}")
        return found is not None and math.prod(found.shape) > 0

    @abstractmethod
    def integers(self) -> Tensor:
        """uint8 ``[out, in]``."""

    @abstractmethod
    def scales(self) -> Tensor:
        """``[out, groups]``."""

    @abstractmethod
    def stored_zeros(self) -> Tensor | None:
        """uint8 ``[out, groups]``; None: the middle of the range."""

    def zeros(self) -> Tensor | None:
        """uint8 ``[out, groups]``; None where all are the middle of the range."""
        found = self.stored_zeros()
        return None if found is None or bool((found == 1 << (self.bits - 1)).all()) else found

    def groups(self) -> Tensor:
        """The group of each column, int64 ``[in]``."""
        if self.shape[1] % self.group_count:
            raise self.fault(f"{self.shape[1]} columns in {self.group_count} groups")
        return torch.arange(self.shape[1]) // (self.shape[1] // self.group_count)

    def _listed_groups(self, suffix: str) -> Tensor:
        found = self.part(suffix).to(torch.int64)
        if found.shape != self.shape[1:] or not bool(((found >= 0) & (found < self.group_count)).all()):
            raise self.fault(f"{suffix} {list(found.shape)} that is no list of {self.group_count} groups")
        return found

    def fault(self, found: str) -> QuantizationError:
        """An error that names the layer."""
        return QuantizationError(f"{self.name} of the checkpoint has {found}; it is not what the format says")

    def dequantized(self) -> Tensor:
        """The weight, fp32 ``[out, in]``."""
        groups = self.groups()
        zeros = self.zeros()
        middle = 1 << (self.bits - 1)
        integers = self.integers().float()
        integers -= middle if zeros is None else zeros.float().index_select(1, groups)
        return integers.mul_(self.scales().float().index_select(1, groups))


class GptqLayer(StoredLayer):
    """``qweight`` int32 ``[in * bits / 32, out]``, ``qzeros`` ``[groups, out * bits / 32]``, ``scales``."""

    def __init__(
        self, name: str, tensors: Tensors, inputs: int, has_true_zeros: bool, symmetric: bool
    ) -> None:
        super().__init__(name, tensors)
        rows, outputs = self.slice("qweight").shape
        self.shape = (outputs, inputs)
        self.bits, rest = divmod(32 * rows, inputs)
        if rest or not 2 <= self.bits <= 8:
            raise self.fault(f"qweight {[rows, outputs]}, for {inputs} columns")
        scales = self.slice("scales")
        self.group_count, self.scale_dtype = scales.shape[0], _dtype(scales)
        self._has_true_zeros, self._symmetric = has_true_zeros, symmetric

    def integers(self) -> Tensor:
        return unpack(self.part("qweight").t(), self.bits)

    def scales(self) -> Tensor:
        return self.part("scales").t().contiguous()

    def stored_zeros(self) -> Tensor | None:
        found = unpack(self.part("qzeros"), self.bits)[:, : self.shape[0]].t()
        # Some that are symmetric say the older format and store the newer one's zeros.
        if self._has_true_zeros or (self._symmetric and bool((found == 1 << (self.bits - 1)).all())):
            return found
        return (found + 1) & ((1 << self.bits) - 1)

    def groups(self) -> Tensor:
        return self._listed_groups("g_idx") if self.has("g_idx") else super().groups()


class AwqLayer(StoredLayer):
    """``qweight`` int32 ``[in, out / 8]``, ``qzeros`` ``[groups, out / 8]``, ``scales`` ``[groups, out]``."""

    bits = 4

    def __init__(self, name: str, tensors: Tensors) -> None:
        super().__init__(name, tensors)
        inputs, words = self.slice("qweight").shape
        scales = self.slice("scales")
        self.shape = (8 * words, inputs)
        self.group_count, self.scale_dtype = scales.shape[0], _dtype(scales)

    def integers(self) -> Tensor:
        return self._unpacked("qweight")

    def scales(self) -> Tensor:
        return self.part("scales").t().contiguous()

    def stored_zeros(self) -> Tensor | None:
        return self._unpacked("qzeros") if self.has("qzeros") else None

    def _unpacked(self, suffix: str) -> Tensor:
        found = unpack(self.part(suffix), 4)
        # Nibble i of a word is column (0, 2, 4, 6, 1, 3, 5, 7)[i] of its eight.
        parts = found.reshape(len(found), -1, 2, 4).transpose(2, 3)
        return parts.reshape(len(found), -1).t().contiguous()


class CompressedLayer(StoredLayer):
    """``weight_packed`` int32 ``[out, in * bits / 32]``, or ``weight`` int8; ``weight_scale``.

    Integers are signed; packed ones, and packed zero points, are stored with half of the range added.
    """

    def __init__(self, name: str, tensors: Tensors, bits: int) -> None:
        super().__init__(name, tensors)
        self.is_packed = self.has("weight_packed")
        if self.is_packed:
            outputs, inputs = (int(size) for size in self.part("weight_shape"))
            self.bits = 32 * self.slice("weight_packed").shape[1] // inputs
            if self.bits not in (2, 4, 8):  # of others there are two packings, which nothing tells apart
                raise self.fault(f"weights packed to {self.bits} bits, and 2, 4 and 8 are read")
        else:
            outputs, inputs = self.slice("weight").shape
            self.bits = bits
        self.shape = (outputs, inputs)
        scale = self.slice("weight_scale")
        self.group_count = scale.shape[1] if len(scale.shape) == 2 else 1
        self.scale_dtype = _dtype(scale)

    def integers(self) -> Tensor:
        if self.is_packed:
            return unpack(self.part("weight_packed"), self.bits)[:, : self.shape[1]]
        return self._shifted(self.part("weight"))

    def _shifted(self, signed: Tensor) -> Tensor:
        return (signed.to(torch.int16) + (1 << (self.bits - 1))).to(torch.uint8)

    def scales(self) -> Tensor:
        return self._by_output(self.part("weight_scale"))

    def _by_output(self, values: Tensor) -> Tensor:
        found = values if values.dim() == 2 else values.reshape(-1, 1)
        return found.expand(self.shape[0], -1).contiguous()  # one of the whole tensor is that of every output

    def stored_zeros(self) -> Tensor | None:
        if not self.has("weight_zero_point"):
            return None
        found = self.part("weight_zero_point")
        if found.dtype == torch.int32 and self.is_packed:
            return unpack(found.t(), self.bits)[:, : self.shape[0]].t()
        return self._by_output(self._shifted(found))

    def groups(self) -> Tensor:
        return self._listed_groups("weight_g_idx") if self.has("weight_g_idx") else super().groups()


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


def _dtype(tensor: Slice) -> torch.dtype:
    return tensor.file.entries[tensor.name].dtype


class Format(ABC):
    """A method of quantisation: which layers of a checkpoint it has, and how to read them.

    Attributes:
        parts: Suffixes of the tensors that belong to quantised layers, and are not read otherwise.
    """

    parts: tuple[str, ...] = ()

    @abstractmethod
    def names(self, tensors: Tensors) -> Iterator[str]:
        """The quantised layers, by the names of the checkpoint."""

    @abstractmethod
    def layer(self, name: str, tensors: Tensors, inputs: int) -> StoredLayer:
        """One of them, which takes ``inputs`` features."""


class Gptq(Format):
    """Of AutoGPTQ, GPTQModel and optimum."""

    parts = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, config: Mapping[str, Any]) -> None:
        said = config.get("checkpoint_format") or config.get("format") or "gptq"
        self._has_true_zeros = said == "gptq_v2"
        self._symmetric = bool(config.get("sym", True))

    def names(self, tensors: Tensors) -> Iterator[str]:
        return (name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight"))

    def layer(self, name: str, tensors: Tensors, inputs: int) -> StoredLayer:
        return GptqLayer(name, tensors, inputs, self._has_true_zeros, self._symmetric)


class Awq(Format):
    """Of AutoAWQ, version gemm."""

    parts = ("qweight", "qzeros", "scales")
    names = Gptq.names

    def layer(self, name: str, tensors: Tensors, inputs: int) -> StoredLayer:
        return AwqLayer(name, tensors)


class CompressedTensors(Format):
    """Of compressed-tensors: integers, whatever is done to activations."""

    parts = (
        *("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
        *("input_scale", "input_zero_point", "input_global_scale", "input_g_idx"),
        *("output_scale", "output_zero_point", "k_scale", "v_scale", "q_scale"),
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._bits = max((each["num_bits"] for each in weights_of(config)), default=8)

    def names(self, tensors: Tensors) -> Iterator[str]:
        for name in tensors:
            if name.endswith(".weight_packed"):
                yield name.removesuffix(".weight_packed")
            elif name.endswith(".weight_scale"):
                layer = name.removesuffix(".weight_scale")
                if f"{layer}.weight" in tensors and _dtype(tensors[f"{layer}.weight"]) == torch.int8:
                    yield layer

    def layer(self, name: str, tensors: Tensors, inputs: int) -> StoredLayer:
        return CompressedLayer(name, tensors, self._bits)


def weights_of(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What compressed-tensors' configuration says of weights, by group."""
    groups = (config.get("config_groups") or {}).values()
    return [group["weights"] for group in groups if isinstance(group, Mapping) and group.get("weights")]


def of(config: Mapping[str, Any]) -> tuple[Format | None, str]:
    """The format of a checkpoint with this ``quantization_config``, or None, and why it is not read."""
    method = config.get("quant_method")
    method = getattr(method, "value", method)
    said = str(config.get("checkpoint_format") or config.get("version") or config.get("format") or "").lower()
    if method == "gptq":
        known = said in ("", "gptq", "gptq_v2")
        return (Gptq(config), "") if known else (None, f"GPTQ in the format {said}")
    if method == "awq":
        bits = config.get("bits", config.get("w_bit", 4))
        known = said in ("", "gemm") and bits == 4
        return (Awq(), "") if known else (None, f"AWQ in the version {said or 'gemm'} with {bits} bits")
    if method == "compressed-tensors":
        reason = _why_not_compressed(config)
        return (None, reason) if reason else (CompressedTensors(config), "")
    return None, f"the method {method}"


def _why_not_compressed(config: Mapping[str, Any]) -> str:
    weights = weights_of(config)
    if not weights or config.get("quantization_status") != "compressed":
        return "compressed-tensors without compressed weights"
    if config.get("dequantize") or config.get("run_compressed") is False:
        return "compressed-tensors that are to be dequantised"
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return "compressed-tensors with sparse weights"
    if config.get("transform_config"):
        return "compressed-tensors with transforms of activations"
    for each in weights:
        if each.get("type", "int") != "int" or each.get("num_bits", 8) > 8:
            return f"compressed-tensors with weights of type {each.get('type')}, {each.get('num_bits')} bits"
        if each.get("strategy", "channel") not in ("tensor", "channel", "group"):
            return f"compressed-tensors with a scale for each {each.get('strategy')}"
    return ""
