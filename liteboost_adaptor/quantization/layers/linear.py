"""A linear layer with a quantized weight."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.int8_linear import quantize_rows
from ...ops.quantized_linear import PACK, quantize_packs
from ..schemes import QuantizedTensor, QuantScheme
from .base import QuantizedLayer

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class QuantizedLinear(QuantizedLayer):
    """``x @ weight^T + bias`` with a weight of 8 or 4 bits.

    ``bias`` is a parameter or None. Where gradients are wanted, the weight is dequantized and torch's linear
    runs: they reach ``x`` (past its rounding, where the scheme rounds it) and ``bias``, not the weight.

    Attributes:
        is_transposed: Whether the layer it replaces keeps its weight ``[in, out]`` (``Conv1D``).
    """

    is_transposed = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        scheme: QuantScheme,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, scheme, dtype, device)
        empty = torch.nn.Parameter(torch.empty(out_features, dtype=dtype, device=device)) if bias else None
        self.register_parameter("bias", empty)

    def forward(self, x: Tensor) -> Tensor:
        return self.product_of(x, self.bias)

    def product_of(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ weight^T + bias``."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        wants_gradient = torch.is_grad_enabled() and (
            x.requires_grad or (bias is not None and bias.requires_grad)
        )
        if self.columns is not None:
            x = x.index_select(-1, self.columns)
        if wants_gradient or x.dtype not in _DTYPES:
            return F.linear(self.quantized_input(x), self.unpacked().dequantize(x.dtype), bias)
        if self.scheme.is_w8a8:
            return torch.ops.liteboost.linear_w8a8(x, self.weight, self.scales, bias)
        tiles: QuantizedLinear | QuantizedTensor = self
        if self.weight.dim() != 3:
            if self.is_read_by_npu():
                return torch.ops.liteboost._npu_linear_packed(
                    x, self.weight, self.scales, self.zero_points, bias
                )
            # Plain rows: brought in for each call, or on a device that has no layout of its own.
            tiles = self._buffers_as_tensor().prepack()
        ops = torch.ops.liteboost
        product = ops.linear_w4a8 if self.scheme.quantizes_activations else ops.linear_packed
        return product(x, tiles.weight, tiles.scales, tiles.zero_points, bias, self.out_features)

    def quantized_input(self, x: Tensor) -> Tensor:
        """``x``, in the order of the weight's columns, as it is multiplied: rounded, where a scheme says."""
        if not self.scheme.quantizes_activations or self.is_packed_for_npu:
            return x
        if self.scheme.is_w8a8:
            integers, scales = quantize_rows(x.detach())
        else:
            integers, scales = quantize_packs(x.detach())
            scales = scales.repeat_interleave(PACK, dim=-1)
        # The gradient passes by the rounding.
        return (integers * scales.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype) + (
            x - x.detach()
        )

    def with_weight(self, weight: Tensor) -> torch.nn.Module:
        """The floating-point layer that it replaces, with this weight ``[out, in]``."""
        from transformers.pytorch_utils import Conv1D  # not before somebody has a model

        with torch.device("meta"):
            if self.is_transposed:
                layer: torch.nn.Module = Conv1D(self.out_features, self.in_features)
            else:
                layer = torch.nn.Linear(self.in_features, self.out_features, bias=False)
        layer.weight = torch.nn.Parameter(weight.t().contiguous() if self.is_transposed else weight)
        layer.bias = self.bias
        return layer.train(self.training)

    def extra_repr(self) -> str:
        sizes = f"{self.scheme.name}, in_features={self.in_features}, out_features={self.out_features}"
        grouped = "" if self.scheme.bits == 8 else f", group_size={self.scheme.group_size}"
        return f"{sizes}{grouped}, bias={self.bias is not None}"
