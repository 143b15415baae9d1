"""Checkpoints of compressed-tensors: integers, and whether inputs of 4 bits are rounded as they come.

Source: its ``pack-quantized`` and ``int-quantized`` compressors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import config_values
from .base import SCALE_DTYPES, CheckpointFormat, CheckpointLayer, Shape, Tensors, unpack_int32
from .config_values import Config, LayerConfig, flag, integer, invalid, mapping

#: Formats that are read, and names of several in one checkpoint.
_FORMATS = ("", "pack-quantized", "int-quantized", "naive-quantized", "mixed-precision")
#: How the names of formats with floating point in blocks of 32 begin (``mxfp4-pack-quantized``).
_MX = "mxfp"
#: Values of ``actorder`` that a list of groups goes with.
_SCATTERED = ("group", "dynamic")
_ORDERS = (*_SCATTERED, "weight", "static")
_STRATEGIES = ("tensor", "channel", "group")
#: How it is said that there are no groups.
_NO_GROUPS = (None, -1, 0)


@dataclass(frozen=True)
class ConfigGroup:
    """One of ``config_groups``: the layers it is for, and what it says of them."""

    targets: tuple[str, ...]
    config: LayerConfig

    def names(self, layer: str) -> bool:
        """Whether it names this layer, or fits its name."""
        return any(
            re.match(target.removeprefix("re:"), layer) if target.startswith("re:") else target == layer
            for target in self.targets
        )


def config_groups(config: Config) -> tuple[ConfigGroup, ...]:
    """The groups with quantized weights.

    Raises:
        QuantizationError: A value is not of the format.
    """
    may_be_negative = config_values.writes_negative_scales(config)
    groups = []
    for name, group in mapping(config, "config_groups").items():
        key = f"config_groups.{name}"
        if not isinstance(group, Mapping):
            raise invalid(key, group, "it must be an object")
        if mapping(group, "weights"):
            layer = _layer_config(group["weights"], f"{key}.weights", may_be_negative)
            layer = replace(layer, quantizes_activations=_quantizes_activations(group))
            groups.append(ConfigGroup(_targets(group.get("targets"), f"{key}.targets"), layer))
    return tuple(groups)


def _targets(values: Any, key: str) -> tuple[str, ...]:
    if not isinstance(values, list) or not values or not all(isinstance(each, str) for each in values):
        raise invalid(key, values, "it must be a list of names")
    for each in values:
        if each.startswith("re:"):
            config_values.check_pattern(key, each.removeprefix("re:"))
    return tuple(values)


def _layer_config(weights: Config, key: str, may_be_negative: bool) -> LayerConfig:
    strategy = config_values.name(weights, "strategy")
    if strategy and strategy not in _STRATEGIES:
        raise invalid(f"{key}.strategy", strategy, f"it must be one of {', '.join(_STRATEGIES)}")
    size = weights.get("group_size")
    if strategy == "group" or (not strategy and size not in _NO_GROUPS):
        strategy, size = "group", config_values.group_size({"group_size": size})
    elif size in _NO_GROUPS:
        size = 0
    else:
        raise invalid(f"{key}.group_size", size, f"the strategy {strategy} has none")
    return LayerConfig(
        integer(weights, "num_bits", 8, range(2, 9)),
        size,
        flag(weights, "symmetric", True),
        _has_group_index(weights, f"{key}.actorder"),
        {"tensor": True, "channel": False}.get(strategy),
        may_be_negative,
    )


def _quantizes_activations(group: Config) -> bool:
    """Whether inputs are rounded to 8 bits as they come, which `RepackedLayer` does beside 4 bits."""
    inputs = mapping(group, "input_activations")
    return (
        inputs.get("num_bits") == 8 and inputs.get("type", "int") == "int" and inputs.get("dynamic") is True
    )


def _has_group_index(weights: Config, key: str) -> bool | None:
    """Whether groups of columns are scattered; True and false are older words for "group" and null."""
    order = weights.get("actorder")
    if order is None or isinstance(order, bool):
        return order or (False if "actorder" in weights else None)
    order = config_values.name(weights, "actorder")
    if order not in _ORDERS:
        raise invalid(key, order, f"it must be one of {', '.join(_ORDERS)}")
    return True if order in _SCATTERED else None


def group_of(groups: Iterable[ConfigGroup], names: Iterable[str]) -> ConfigGroup | None:
    """The group for a layer with these ``names``, or None."""
    groups, names = tuple(groups), tuple(names)
    # A name comes before a class, as compressed-tensors looks targets up.
    fitting = [group for group in groups if any(group.names(name) for name in names)]
    fitting += [group for group in groups if "Linear" in group.targets]
    fitting += groups if len(groups) == 1 else ()
    return fitting[0] if fitting else None


class CompressedTensorsFormat(CheckpointFormat):
    """Layers in groups, each with a configuration."""

    method = "compressed-tensors"
    suffixes = (
        *("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
        *("input_scale", "input_zero_point", "input_global_scale", "input_g_idx"),
        *("output_scale", "output_zero_point", "k_scale", "v_scale", "q_scale"),
    )
    markers = ("weight_packed", "weight_scale", "weight_shape")

    def __init__(self, config: Config) -> None:
        self._groups = config_groups(config)

    @staticmethod
    def why_unsupported(config: Config, version: str) -> str:
        groups = [each for each in mapping(config, "config_groups").values() if isinstance(each, Mapping)]
        weights = [each for each in (mapping(group, "weights") for group in groups) if each]
        if not weights or config.get("quantization_status") != "compressed":
            return "compressed-tensors without compressed weights"
        if config.get("dequantize") or config.get("run_compressed") is False:
            return "compressed-tensors that are to be dequantized"
        if mapping(config, "sparsity_config").get("format", "dense") != "dense":
            return "compressed-tensors with sparse weights"
        if config.get("transform_config"):
            return "compressed-tensors with transforms of activations"
        for each in (config, *groups):
            name = config_values.name(each, "format")
            if name.startswith(_MX):
                return (
                    f"compressed-tensors in the MX format {name}: dequantize it with that package "
                    "(run_compressed=False), save_pretrained it, and quantize what is saved"
                )
            if name not in _FORMATS:
                return f"compressed-tensors in the format {name}"
        for each in weights:
            bits = each.get("num_bits", 8)
            if each.get("type", "int") != "int" or (type(bits) is int and bits > 8):
                return f"compressed-tensors with weights of type {each.get('type')}, {bits} bits"
            if each.get("strategy") not in (None, *_STRATEGIES):
                return f"compressed-tensors with a scale for each {each.get('strategy')}"
        return ""

    def layer(self, name: str, target: str, tensors: Tensors, wanted: Shape | None) -> CheckpointLayer:
        group = group_of(self._groups, (name, target))
        if group is None:
            targets = [each.targets for each in self._groups]
            raise invalid("config_groups", targets, f"no group has targets for {name}")
        return CompressedTensorsLayer(name, tensors, wanted, group.config)


class CompressedTensorsLayer(CheckpointLayer):
    """``weight_packed`` int32 ``[out, in * bits / 32]``, or ``weight`` int8; ``weight_scale``.

    Integers are signed; packed ones, and packed zero points, have half of the range added.
    """

    scales_suffix = "weight_scale"
    index_suffix = "weight_g_idx"
    index_setting = "actorder = group"

    def __init__(self, name: str, tensors: Tensors, wanted: Shape | None, config: LayerConfig) -> None:
        super().__init__(name, tensors, config)
        # A weight that is only packed has its shape beside it.
        self._is_packed = f"{name}.weight" not in tensors or self.has("weight_packed")
        shape = self._packed_shape() if self._is_packed else self.matrix_shape("weight", torch.int8)
        self.set_shape(shape, wanted)
        outputs = shape[0]
        of_tensor, of_outputs = ((1,), (), (1, 1)), ((outputs, 1), (outputs,))
        shapes: tuple[tuple[int, ...], ...] = ((outputs, self.num_groups),)
        if not config.group_size:
            shapes = {True: of_tensor, False: of_outputs, None: of_tensor + of_outputs}[config.per_tensor]
        self.scale_dtype = self.expect("weight_scale", SCALE_DTYPES, *shapes)
        if self.has("weight_zero_point"):
            self._check_zero_points(shapes)
        elif config.symmetric is False:
            raise self.fault("no weight_zero_point where quantization_config says symmetric = false")
        self.check_group_index()

    def _packed_shape(self) -> tuple[int, int]:
        rows, words = self.matrix_shape("weight_packed")
        listed = self.slice("weight_shape")
        if listed.shape != (2,) or listed.dtype not in (torch.int64, torch.int32):
            raise self.fault(f"weight_shape {list(listed.shape)} of {listed.dtype}, wanted two integers")
        outputs, inputs = (int(size) for size in self.read("weight_shape"))
        if outputs != rows or not 0 < inputs <= 32 * words:
            raise self.fault(f"weight_shape {[outputs, inputs]} beside weight_packed {[rows, words]}")
        packed = 32 * words // inputs
        if words != -(-inputs * self.bits // 32):
            raise self.fault(
                f"weight_packed {[rows, words]}, {packed} bits for each of {inputs} columns where "
                f"quantization_config says num_bits = {self.bits}"
            )
        if self.bits not in (2, 4, 8):  # of others there are two packings, which nothing tells apart
            raise self.fault(f"weights packed to {packed} bits, and 2, 4 and 8 are read", "weight_packed")
        return outputs, inputs

    def _check_zero_points(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        if self._has_packed_zero_points():
            words = -(-self.shape[0] * self.bits // 32)
            self.expect("weight_zero_point", (torch.int32,), (words, self.num_groups))
        else:
            kinds = (torch.int8, torch.int16, torch.int32, torch.int64)
            self.expect("weight_zero_point", kinds, *shapes)

    def _has_packed_zero_points(self) -> bool:
        return self._is_packed and self.slice("weight_zero_point").dtype == torch.int32

    def integers(self) -> Tensor:
        if self._is_packed:
            return unpack_int32(self.read("weight_packed"), self.bits)[:, : self.shape[1]]
        return self._unsigned("weight")

    def _unsigned(self, suffix: str) -> Tensor:
        """Signed integers with half of the range added."""
        signed, half = self.read(suffix), 1 << (self.bits - 1)
        least, most = (int(each) for each in signed.aminmax()) if signed.numel() else (0, 0)
        if least < -half or most >= half:
            raise self.fault(
                f"{suffix} from {least} to {most} where quantization_config says num_bits = {self.bits}: "
                f"{-half} to {half - 1}"
            )
        return (signed.to(torch.int16) + half).to(torch.uint8)

    def raw_scales(self) -> Tensor:
        return self._by_output(self.read("weight_scale"))

    def _by_output(self, values: Tensor) -> Tensor:
        """``[out, groups]``; what is of the whole tensor is that of every output."""
        values = values if values.dim() == 2 else values.reshape(-1, 1)
        return values.expand(self.shape[0], -1).contiguous()

    def raw_zero_points(self) -> Tensor | None:
        if not self.has("weight_zero_point"):
            return None
        if self._has_packed_zero_points():
            return unpack_int32(self.read("weight_zero_point").t(), self.bits)[:, : self.shape[0]].t()
        return self._by_output(self._unsigned("weight_zero_point"))
