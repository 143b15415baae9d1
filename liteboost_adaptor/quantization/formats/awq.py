"""Checkpoints of AutoAWQ, version gemm.

Source: its ``WQLinear_GEMM``: weights and zero points packed along the outputs, eight in the order
0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import config_values
from .base import SCALE_DTYPES, CheckpointFormat, CheckpointLayer, Shape, Tensors, unpack_int32
from .config_values import Config, LayerConfig


class AwqFormat(CheckpointFormat):
    """One configuration for all layers, of 4 bits."""

    method = "awq"
    suffixes = ("qweight", "qzeros", "scales")
    markers = ("qweight", "qzeros")

    def __init__(self, config: Config) -> None:
        size = {"group_size": config.get("group_size", config.get("q_group_size", 128))}
        self._config = LayerConfig(
            4,
            symmetric=not config_values.flag(config, "zero_point", True),
            group_size=config_values.group_size(size),
            may_be_negative=config_values.writes_negative_scales(config),
        )

    @staticmethod
    def why_unsupported(config: Config, version: str) -> str:
        bits = config.get("bits", config.get("w_bit", 4))
        is_read = version in ("", "gemm") and bits == 4
        return "" if is_read else f"AWQ in the version {version or 'gemm'} with {bits} bits"

    def layer(self, name: str, target: str, tensors: Tensors, wanted: Shape | None) -> CheckpointLayer:
        return AwqLayer(name, tensors, wanted, self._config)


class AwqLayer(CheckpointLayer):
    """``qweight`` int32 ``[in, out / 8]``, ``qzeros`` ``[groups, out / 8]``, ``scales`` ``[groups, out]``."""

    def __init__(self, name: str, tensors: Tensors, wanted: Shape | None, config: LayerConfig) -> None:
        super().__init__(name, tensors, config)
        inputs, words = self.matrix_shape("qweight")
        self.set_shape((8 * words, inputs), wanted)
        self.scale_dtype = self.expect("scales", SCALE_DTYPES, (self.num_groups, 8 * words))
        if self.has("qzeros") or not config.symmetric:
            self.expect("qzeros", (torch.int32,), (self.num_groups, words))

    def integers(self) -> Tensor:
        return self._unpacked("qweight")

    def raw_scales(self) -> Tensor:
        return self.read("scales").t().contiguous()

    def raw_zero_points(self) -> Tensor | None:
        return self._unpacked("qzeros") if self.has("qzeros") else None

    def _unpacked(self, suffix: str) -> Tensor:
        nibbles = unpack_int32(self.read(suffix), 4)
        # Nibble i of a word is column (0, 2, 4, 6, 1, 3, 5, 7)[i] of its eight.
        columns = nibbles.reshape(len(nibbles), -1, 2, 4).transpose(2, 3)
        return columns.reshape(len(nibbles), -1).t().contiguous()
