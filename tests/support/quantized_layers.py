"""Quantized layers of given weights, and such weights as ops take them."""

from __future__ import annotations

import torch
from torch import Tensor

from liteboost_adaptor.quantization import QuantizedLinear, QuantScheme
from liteboost_adaptor.quantization.schemes import QuantizedTensor, quantize


def linear(layer: torch.nn.Linear, scheme: QuantScheme) -> QuantizedLinear:
    """``layer`` quantized; its bias is the same parameter."""
    made = QuantizedLinear(layer.in_features, layer.out_features, False, scheme, layer.weight.dtype, "meta")
    made.fill(quantize(layer.weight.detach(), scheme))
    made.bias = layer.bias
    return made.train(layer.training)


def packed(weights: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """``weights`` as files have them, as `linear_packed` and `experts_packed` take them."""
    made = QuantizedTensor(**weights).prepack()
    return {"tiles": made.weight, "scales": made.scales, "zero_points": made.zero_points}
