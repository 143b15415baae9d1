"""Quantized layers of given weights, and such weights as ops take them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
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


def check_products(model: torch.nn.Module, ids: torch.Tensor) -> None:
    """Every quantized layer multiplies its input, rounded if its scheme says so, by its weight."""
    layers = [each for each in model.modules() if isinstance(each, QuantizedLinear)]
    seen: list[tuple[QuantizedLinear, torch.Tensor, torch.Tensor]] = []
    hooks = [
        layer.register_forward_hook(lambda layer, x, out: seen.append((layer, x[0], out))) for layer in layers
    ]
    with torch.no_grad():
        model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    assert len(seen) == len(layers) > 0
    for layer, x, out in seen:
        columns = x if layer.columns is None else x.index_select(-1, layer.columns)
        exact = F.linear(layer.quantized_input(columns).double(), layer.unpacked().dequantize(torch.float64))
        assert (out.double() - exact).norm() <= 2e-6 * exact.norm()
