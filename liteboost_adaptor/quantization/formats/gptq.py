"""Checkpoints of AutoGPTQ, GPTQModel and optimum.

Source: their ``QuantLinear``: ``qweight`` packed along the inputs, ``qzeros`` along the outputs, minus one
but for ``gptq_v2``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from . import config_values
from .base import SCALE_DTYPES, CheckpointFormat, CheckpointLayer, Shape, Tensors, unpack_int32
from .config_values import Config, LayerConfig, flag, integer, invalid


class GptqFormat(CheckpointFormat):
    """With exceptions by layer (GPTQModel's ``dynamic``)."""

    method = "gptq"
    suffixes = ("qweight", "qzeros", "scales", "g_idx")
    markers = ("qweight", "qzeros")

    def __init__(self, config: Config) -> None:
        name = config_values.name(config, "checkpoint_format") or config_values.name(config, "format")
        self._is_v2 = name == "gptq_v2"
        self._exceptions: list[tuple[str, Config]] = []
        for pattern, changes in config_values.mapping(config, "dynamic").items():
            if pattern.startswith("-:"):
                continue  # layers that are not quantized
            if not isinstance(changes, Mapping):
                raise invalid(f"dynamic[{pattern!r}]", changes, "it must be an object")
            config_values.check_pattern("dynamic", pattern.removeprefix("+:"))
            self._exceptions.append((pattern.removeprefix("+:"), changes))
        may_be_negative = config_values.writes_negative_scales(config)
        self._default = _layer_config(config, LayerConfig(4, 128, may_be_negative=may_be_negative))

    @staticmethod
    def why_unsupported(config: Config, version: str) -> str:
        return "" if version in ("", "gptq", "gptq_v2") else f"GPTQ in the format {version}"

    def layer(self, name: str, target: str, tensors: Tensors, wanted: Shape | None) -> CheckpointLayer:
        # The first exception that fits, as GPTQModel looks them up.
        changes = next((each for pattern, each in self._exceptions if re.match(pattern, name)), None)
        config = self._default if changes is None else _layer_config(changes, self._default)
        return GptqLayer(name, tensors, wanted, config, self._is_v2)


def _layer_config(config: Config, default: LayerConfig) -> LayerConfig:
    return replace(
        default,
        bits=integer(config, "bits", default.bits, (2, 3, 4, 8)),
        group_size=config_values.group_size(config, default.group_size or -1),
        symmetric=flag(config, "sym", default.symmetric),
        has_group_index=flag(config, "desc_act", default.has_group_index),
    )


class GptqLayer(CheckpointLayer):
    """``qweight`` int32 ``[in * bits / 32, out]``, ``qzeros`` ``[groups, out * bits / 32]``, ``scales``."""

    index_suffix = "g_idx"
    index_setting = "desc_act = true"

    def __init__(
        self, name: str, tensors: Tensors, wanted: Shape | None, config: LayerConfig, is_v2: bool
    ) -> None:
        super().__init__(name, tensors, config)
        rows, outputs = self.matrix_shape("qweight")
        inputs = wanted[1] if wanted else 32 * rows // config.bits
        if 32 * rows != config.bits * inputs:
            raise self.fault(
                f"qweight {[rows, outputs]}, {32 * rows / inputs:.4g} bits each for {inputs} columns "
                f"where quantization_config says bits = {config.bits}"
            )
        self.set_shape((outputs, inputs), wanted)
        self.scale_dtype = self.expect("scales", SCALE_DTYPES, (self.num_groups, outputs))
        self.expect("qzeros", (torch.int32,), (self.num_groups, -(-outputs * config.bits // 32)))
        self.check_group_index()
        self._is_v2 = is_v2

    def integers(self) -> Tensor:
        return unpack_int32(self.read("qweight").t(), self.bits)

    def raw_scales(self) -> Tensor:
        return self.read("scales").t().contiguous()

    def raw_zero_points(self) -> Tensor | None:
        zeros = unpack_int32(self.read("qzeros"), self.bits)[:, : self.shape[0]].t()
        middle = 1 << (self.bits - 1)
        # Some that are symmetric say one format and have the zero points of the other.
        if self.config.symmetric is not False and any(
            bool((zeros == each).all()) for each in (middle, middle - 1)
        ):
            return torch.full_like(zeros, middle)
        return zeros if self._is_v2 else (zeros + 1) & ((1 << self.bits) - 1)
