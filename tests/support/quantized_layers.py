"""Quantized layers of given weights."""

from __future__ import annotations

import torch

from liteboost_adaptor.quantization import QuantizedLinear, QuantScheme
from liteboost_adaptor.quantization.schemes import quantize


def linear(layer: torch.nn.Linear, scheme: QuantScheme) -> QuantizedLinear:
    """``layer`` quantized; its bias is the same parameter."""
    made = QuantizedLinear(layer.in_features, layer.out_features, False, scheme, layer.weight.dtype, "meta")
    made.fill(quantize(layer.weight.detach(), scheme))
    made.bias = layer.bias
    return made.train(layer.training)
