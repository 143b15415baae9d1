"""How GPTQ, AWQ and compressed-tensors keep the weight of a layer: which tensors, and where a bit is.

Each is read to the same: unsigned integers ``[out, in]``, a scale and an integer that stands for zero for
each output and group, and the group of each column. A weight is ``scale * (integer - zero)``. What the
tensors are is compared with what the configuration says (`stated`).

Sources: AutoGPTQ's and GPTQModel's ``QuantLinear`` (``qweight`` packed along the inputs, ``qzeros`` along
the outputs, stored minus one but for ``gptq_v2``), AutoAWQ's ``WQLinear_GEMM`` (both packed along the
outputs, eight in the order 0, 2, 4, 6, 1, 3, 5, 7), compressed-tensors' ``pack-quantized`` and
``int-quantized`` compressors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from . import stated
from .stated import GptqStated, Stated
from .stored_layer import SCALES, Shape, StoredLayer, Tensors, unpack


class GptqLayer(StoredLayer):
    """``qweight`` int32 ``[in * bits / 32, out]``, ``qzeros`` ``[groups, out * bits / 32]``, ``scales``."""

    def __init__(
        self, name: str, tensors: Tensors, wanted: Shape | None, stated: Stated, has_true_zeros: bool
    ) -> None:
        super().__init__(name, tensors, stated)
        rows, outputs = self.matrix("qweight")
        inputs = wanted[1] if wanted else 32 * rows // stated.bits
        bits, rest = divmod(32 * rows, inputs)
        if rest or not 2 <= bits <= 8:
            raise self.fault(
                f"qweight {[rows, outputs]}, for {inputs} columns, where quantization_config says gptq "
                f"with bits = {stated.bits}",
                "qweight",
            )
        if bits != stated.bits:
            raise self.fault(
                f"qweight {[rows, outputs]}, {bits} bits for each of {inputs} columns where "
                f"quantization_config says bits = {stated.bits}",
                "qweight",
            )
        self.take_shape((outputs, inputs), wanted)
        self.scale_dtype = self.expect("scales", SCALES, (self.group_count, outputs))
        self.expect("qzeros", (torch.int32,), (self.group_count, -(-outputs * bits // 32)))
        if self.has("g_idx"):
            self.expect("g_idx", (torch.int32, torch.int64), (inputs,))
        elif stated.is_listed and self.group_count > 1:
            raise self.fault("no g_idx where quantization_config says desc_act = true", "g_idx")
        self._has_true_zeros = has_true_zeros

    def integers(self) -> Tensor:
        return unpack(self.part("qweight").t(), self.bits)

    def stored_scales(self) -> Tensor:
        return self.part("scales").t().contiguous()

    scales_suffix = "scales"

    def stored_zeros(self) -> Tensor | None:
        found = unpack(self.part("qzeros"), self.bits)[:, : self.shape[0]].t()
        middle = 1 << (self.bits - 1)
        # Some that are symmetric say one format and store the zeros of the other.
        if self.stated.symmetric is not False and any(
            bool((found == each).all()) for each in (middle, middle - 1)
        ):
            return torch.full_like(found, middle)
        return found if self._has_true_zeros else (found + 1) & ((1 << self.bits) - 1)

    def groups(self) -> Tensor:
        return self.listed_groups("g_idx") if self.has("g_idx") else super().groups()


class AwqLayer(StoredLayer):
    """``qweight`` int32 ``[in, out / 8]``, ``qzeros`` ``[groups, out / 8]``, ``scales`` ``[groups, out]``."""

    scales_suffix = "scales"

    def __init__(self, name: str, tensors: Tensors, wanted: Shape | None, stated: Stated) -> None:
        super().__init__(name, tensors, stated)
        inputs, words = self.matrix("qweight")
        self.take_shape((8 * words, inputs), wanted)
        self.scale_dtype = self.expect("scales", SCALES, (self.group_count, 8 * words))
        if self.has("qzeros") or not stated.symmetric:
            self.expect("qzeros", (torch.int32,), (self.group_count, words))

    def integers(self) -> Tensor:
        return self._unpacked("qweight")

    def stored_scales(self) -> Tensor:
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

    scales_suffix = "weight_scale"

    def __init__(self, name: str, tensors: Tensors, wanted: Shape | None, stated: Stated) -> None:
        super().__init__(name, tensors, stated)
        # A weight that is only packed has its shape beside it.
        self.is_packed = f"{name}.weight" not in tensors or self.has("weight_packed")
        shape = self._packed_shape() if self.is_packed else self.matrix("weight", torch.int8)
        self.take_shape(shape, wanted)
        outputs, inputs = shape
        of_tensor, of_outputs = ((1,), (), (1, 1)), ((outputs, 1), (outputs,))
        shapes: tuple[tuple[int, ...], ...] = ((outputs, self.group_count),)
        if not stated.group_size:
            shapes = {True: of_tensor, False: of_outputs, None: of_tensor + of_outputs}[stated.per_tensor]
        self.scale_dtype = self.expect("weight_scale", SCALES, *shapes)
        if self.has("weight_zero_point"):
            self._check_zero_points(shapes)
        elif stated.symmetric is False:
            raise self.fault(
                "no weight_zero_point where quantization_config says symmetric = false", "weight_zero_point"
            )
        if self.has("weight_g_idx"):
            self.expect("weight_g_idx", (torch.int32, torch.int64), (inputs,))
        elif stated.is_listed and self.group_count > 1:
            raise self.fault(
                "no weight_g_idx where quantization_config says actorder = group", "weight_g_idx"
            )

    def _packed_shape(self) -> tuple[int, int]:
        rows, words = self.matrix("weight_packed")
        listed = self.slice("weight_shape")
        if listed.shape != (2,) or listed.dtype not in (torch.int64, torch.int32):
            raise self.fault(
                f"weight_shape {list(listed.shape)} of {listed.dtype}, wanted two integers", "weight_shape"
            )
        outputs, inputs = (int(size) for size in self.part("weight_shape"))
        if outputs != rows or not 0 < inputs <= 32 * words:
            raise self.fault(
                f"weight_shape {[outputs, inputs]} beside weight_packed {[rows, words]}", "weight_shape"
            )
        packed = 32 * words // inputs
        if words != -(-inputs * self.bits // 32):
            raise self.fault(
                f"weight_packed {[rows, words]}, {packed} bits for each of {inputs} columns where "
                f"quantization_config says num_bits = {self.bits}",
                "weight_packed",
            )
        if self.bits not in (2, 4, 8):  # of others there are two packings, which nothing tells apart
            raise self.fault(f"weights packed to {packed} bits, and 2, 4 and 8 are read", "weight_packed")
        return outputs, inputs

    def _check_zero_points(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        if self._has_packed_zeros():
            self.expect(
                "weight_zero_point", (torch.int32,), (-(-self.shape[0] * self.bits // 32), self.group_count)
            )
        else:
            kinds = (torch.int8, torch.int16, torch.int32, torch.int64)
            self.expect("weight_zero_point", kinds, *shapes)

    def _has_packed_zeros(self) -> bool:
        return self.is_packed and self.slice("weight_zero_point").dtype == torch.int32

    def integers(self) -> Tensor:
        if self.is_packed:
            return unpack(self.part("weight_packed"), self.bits)[:, : self.shape[1]]
        return self._shifted("weight")

    def _shifted(self, suffix: str) -> Tensor:
        """Signed integers as unsigned ones, which they fit."""
        signed, half = self.part(suffix), 1 << (self.bits - 1)
        least, most = (int(each) for each in signed.aminmax()) if signed.numel() else (0, 0)
        if least < -half or most >= half:
            raise self.fault(
                f"{suffix} from {least} to {most} where quantization_config says num_bits = {self.bits}: "
                f"{-half} to {half - 1}",
                suffix,
            )
        return (signed.to(torch.int16) + half).to(torch.uint8)

    def stored_scales(self) -> Tensor:
        return self._by_output(self.part("weight_scale"))

    def _by_output(self, values: Tensor) -> Tensor:
        found = values if values.dim() == 2 else values.reshape(-1, 1)
        return found.expand(self.shape[0], -1).contiguous()  # one of the whole tensor is that of every output

    def stored_zeros(self) -> Tensor | None:
        if not self.has("weight_zero_point"):
            return None
        if self._has_packed_zeros():
            return unpack(self.part("weight_zero_point").t(), self.bits)[:, : self.shape[0]].t()
        return self._by_output(self._shifted("weight_zero_point"))

    def groups(self) -> Tensor:
        return self.listed_groups("weight_g_idx") if self.has("weight_g_idx") else super().groups()


class Format(ABC):
    """A method of quantisation: which layers of a checkpoint it has, and how to read them.

    Attributes:
        parts: Suffixes of the tensors that belong to quantised layers, and are not read otherwise.
    """

    parts: tuple[str, ...] = ()

    @abstractmethod
    def names(self, tensors: Tensors) -> Iterator[str]:
        """The quantised layers, by the names of the checkpoint: also such that are not whole."""

    @abstractmethod
    def layer(self, name: str, target: str, tensors: Tensors, wanted: Shape | None) -> StoredLayer:
        """One of them, which is ``target`` in the model, with the shape that is ``wanted`` there.

        Raises:
            QuantizationError: It has another, or its tensors are not what the configuration says.
        """


def _owners_of(tensors: Tensors, parts: tuple[str, ...]) -> Iterator[str]:
    """Names in front of any of ``parts``, each once."""
    split = (name.rpartition(".") for name in tensors)
    return iter(dict.fromkeys(owner for owner, _, part in split if part in parts))


class Gptq(Format):
    """Of AutoGPTQ, GPTQModel and optimum."""

    parts = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._stated = GptqStated.of(config)

    def names(self, tensors: Tensors) -> Iterator[str]:
        return _owners_of(tensors, ("qweight", "qzeros"))

    def layer(self, name: str, target: str, tensors: Tensors, wanted: Shape | None) -> StoredLayer:
        said = self._stated
        return GptqLayer(name, tensors, wanted, said.of_layer(name), said.has_true_zeros)


class Awq(Format):
    """Of AutoAWQ, version gemm."""

    parts = ("qweight", "qzeros", "scales")
    names = Gptq.names

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._stated = stated.awq(config)

    def layer(self, name: str, target: str, tensors: Tensors, wanted: Shape | None) -> StoredLayer:
        return AwqLayer(name, tensors, wanted, self._stated)


class CompressedTensors(Format):
    """Of compressed-tensors: integers, whatever is done to activations."""

    parts = (
        *("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
        *("input_scale", "input_zero_point", "input_global_scale", "input_g_idx"),
        *("output_scale", "output_zero_point", "k_scale", "v_scale", "q_scale"),
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._groups = stated.compressed(config)

    def names(self, tensors: Tensors) -> Iterator[str]:
        return _owners_of(tensors, ("weight_packed", "weight_scale", "weight_shape"))

    def layer(self, name: str, target: str, tensors: Tensors, wanted: Shape | None) -> StoredLayer:
        said = stated.of_layer(self._groups, (name, target))
        if said is None:
            raise stated.fault(
                "config_groups", [group.targets for group in self._groups], f"no group has targets for {name}"
            )
        return CompressedLayer(name, tensors, wanted, said)


def of(config: Mapping[str, Any]) -> tuple[Format | None, str]:
    """The format of a checkpoint with this ``quantization_config``, or None, and why it is not read.

    Raises:
        QuantizationError: The format is one of ours, and a value is none that it allows.
    """
    method = stated.method_of(config)
    said = stated.word(config, "checkpoint_format") or stated.word(config, "version")
    said = said or stated.word(config, "format")
    if method == "gptq":
        known = said in ("", "gptq", "gptq_v2")
        return (Gptq(config), "") if known else (None, f"GPTQ in the format {said}")
    if method == "awq":
        bits = config.get("bits", config.get("w_bit", 4))
        known = said in ("", "gemm") and bits == 4
        return (Awq(config), "") if known else (None, f"AWQ in the version {said or 'gemm'} with {bits} bits")
    if method == "compressed-tensors":
        reason = _why_not_compressed(config)
        return (None, reason) if reason else (CompressedTensors(config), "")
    return None, f"the method {method}"


#: Formats of compressed-tensors that are read, and names of several in one checkpoint.
_COMPRESSED = ("", "pack-quantized", "int-quantized", "naive-quantized", "mixed-precision")


def _why_not_compressed(config: Mapping[str, Any]) -> str:
    groups = [each for each in stated.mapping(config, "config_groups").values() if isinstance(each, Mapping)]
    weights = [each for each in (stated.mapping(group, "weights") for group in groups) if each]
    if not weights or config.get("quantization_status") != "compressed":
        return "compressed-tensors without compressed weights"
    if config.get("dequantize") or config.get("run_compressed") is False:
        return "compressed-tensors that are to be dequantised"
    if stated.mapping(config, "sparsity_config").get("format", "dense") != "dense":
        return "compressed-tensors with sparse weights"
    if config.get("transform_config"):
        return "compressed-tensors with transforms of activations"
    for each in (config, *groups):
        if stated.word(each, "format") not in _COMPRESSED:
            return f"compressed-tensors in the format {each.get('format')}"
    for each in weights:
        bits = each.get("num_bits", 8)
        if each.get("type", "int") != "int" or (type(bits) is int and bits > 8):
            return f"compressed-tensors with weights of type {each.get('type')}, {bits} bits"
        if each.get("strategy") not in (None, "tensor", "channel", "group"):
            return f"compressed-tensors with a scale for each {each.get('strategy')}"
    return ""
