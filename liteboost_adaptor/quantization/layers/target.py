"""A weight of a model that may be quantized, and the module that takes its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from ..schemes import QuantizedTensor, QuantScheme
from .base import QuantizedLayer
from .experts import QuantizedExperts
from .linear import QuantizedLinear
from .weight_shape import WeightShape


@dataclass(frozen=True)
class QuantTarget:
    """A linear layer of a model, or a parameter with the weights of a layer's experts.

    Attributes:
        name: As `torch.nn.Module.get_submodule` takes it once it is quantized.
        layer: The layer; of experts, the module that has the parameter.
        scheme: What it is quantized to, or None.
        reason: Why it stays as it is, if nobody asked for that.
        tied: The name of the parameter that its weight is, where it is another module's, too.
        experts: The shape of the parameter of experts; of a linear layer None.
    """

    name: str
    layer: torch.nn.Module
    scheme: QuantScheme | None
    reason: str = ""
    tied: str = ""
    experts: WeightShape | None = None

    @property
    def parameter(self) -> str:
        """The name of the weight before it is quantized."""
        return f"{self.name}.weight" if self.experts is None else self.name

    @property
    def is_transposed(self) -> bool:
        """Whether a linear layer keeps its weight ``[in, out]``."""
        return self.experts is None and isinstance(self.layer, Conv1D)

    def matrix(self, weight: Tensor) -> Tensor:
        """The parameter as `QuantizedTensor.dequantize` gives it back."""
        if self.experts is not None:
            return self.experts.matrix(weight)
        return weight.t().contiguous() if self.is_transposed else weight

    def replace(self, model: torch.nn.Module, quantized: QuantizedTensor | None = None) -> QuantizedLayer:
        """Put a quantized module in its place in ``model``, on the meta device where it has no weight yet."""
        module = self._module("meta").train(self.layer.training)
        if quantized is not None:
            module.fill(quantized)
        if self.experts is None:
            module.register_parameter("bias", self.layer.bias)
            model.set_submodule(self.name, module)
        else:
            local = self.name.rpartition(".")[2]
            delattr(self.layer, local)
            self.layer.add_module(local, module)
        return module

    def _module(self, device: Any) -> QuantizedLayer:
        layer, scheme = self.layer, self.scheme
        assert scheme is not None
        if self.experts is not None:
            dtype = getattr(layer, self.name.rpartition(".")[2]).dtype
            return QuantizedExperts(self.experts, scheme, dtype, device)
        outputs, inputs = sizes_of(layer)
        linear = QuantizedLinear(inputs, outputs, False, scheme, layer.weight.dtype, device)
        linear.is_transposed = self.is_transposed
        return linear


def sizes_of(layer: torch.nn.Module) -> tuple[int, int]:
    """Outputs and inputs of a linear layer."""
    return (layer.nf, layer.nx) if isinstance(layer, Conv1D) else (layer.out_features, layer.in_features)
