"""A linear layer that keeps its weight as integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import native
from ..ops.int8_linear import quantize_rows
from ..ops.quantized_linear import dequantize_w4, dequantize_w8
from .rounding import Quantized, quantize
from .schemes import Scheme

_SERVED = (torch.float32, torch.bfloat16, torch.float16)


class QuantizedLinear(torch.nn.Module):
    """``x @ weight^T + bias`` with a weight of 8 or 4 bits.

    Buffers: ``weight``, ``scales`` and, where the scheme has them, ``zero_points``, as `linear_w8`,
    `linear_w4` and `linear_w8a8` take them; ``columns`` where the weight's columns are not those of ``x`` in
    order: the column of ``x`` that each is multiplied by. ``bias`` is a parameter or None. Scales keep their
    dtype when the module is cast.
    Where gradients are wanted, the weight is multiplied out and torch's linear runs: they reach ``x`` (past
    its rounding, where the scheme rounds it) and ``bias``, not the weight.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        scheme: Scheme,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ) -> None:
        super().__init__()
        native.load()  # the ops
        self.in_features, self.out_features, self.scheme = in_features, out_features, scheme
        for name, (shape, kind) in scheme.shapes(out_features, in_features).items():
            self.register_buffer(name, torch.empty(shape, dtype=kind, device=device))
        for name in ("zero_points", "columns"):
            if name not in self._buffers:
                self.register_buffer(name, None)
        made = torch.nn.Parameter(torch.empty(out_features, dtype=dtype, device=device)) if bias else None
        self.register_parameter("bias", made)

    @classmethod
    def of(cls, layer: torch.nn.Linear, scheme: Scheme, name: str = "the weight") -> QuantizedLinear:
        """``layer`` quantised; its bias is the same parameter.

        Raises:
            QuantizationError: As of `rounding.quantize`.
        """
        made = cls(layer.in_features, layer.out_features, False, scheme, device="meta")
        made.fill(quantize(layer.weight.detach(), scheme, name))
        made.bias = layer.bias
        made.train(layer.training)
        return made

    @property
    def width(self) -> int:
        """Columns of the weight as it is kept."""
        return self.in_features if self.columns is None else len(self.columns)

    def fill(self, quantized: Quantized) -> None:
        """Take the tensors of a quantised weight."""
        with torch.inference_mode(False):
            for name, tensor in quantized.tensors().items():
                setattr(self, name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        bias = self.bias
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        wants_gradient = torch.is_grad_enabled() and (
            x.requires_grad or (bias is not None and bias.requires_grad)
        )
        if wants_gradient or x.dtype not in _SERVED:
            return F.linear(self.rounded(x), self.dequantized(x.dtype), bias)
        if self.columns is not None:
            x = x.index_select(-1, self.columns)
        if self.scheme.rounds_activations:
            return torch.ops.liteboost.linear_w8a8(x, self.weight, self.scales, bias)
        if self.scheme.bits == 8:
            return torch.ops.liteboost.linear_w8(x, self.weight, self.scales, bias)
        return torch.ops.liteboost.linear_w4(x, self.weight, self.scales, self.zero_points, bias)

    def rounded(self, x: Tensor) -> Tensor:
        """``x`` as the weight is multiplied by it: rounded row by row, where the scheme does that."""
        if not self.scheme.rounds_activations:
            return x
        integers, scales = quantize_rows(x.detach())
        # The gradient passes by the rounding.
        return (integers * scales.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype) + (
            x - x.detach()
        )

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight that the layer multiplies by."""
        if self.scheme.bits == 8:
            return dequantize_w8(self.weight, self.scales, dtype)
        if self.columns is None:
            return dequantize_w4(self.weight, self.scales, self.zero_points, dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        picked = dequantize_w4(self.weight, self.scales, self.zero_points, wide)
        whole = picked.new_zeros(self.out_features, self.in_features)
        return whole.index_add_(1, self.columns, picked).to(dtype)

    def __setstate__(self, state: dict[str, Any]) -> None:
        native.load()
        super().__setstate__(state)

    def extra_repr(self) -> str:
        kept = f"{self.scheme.name}, in_features={self.in_features}, out_features={self.out_features}"
        grouped = "" if self.scheme.bits == 8 else f", group_size={self.scheme.group_size}"
        return f"{kept}{grouped}, bias={self.bias is not None}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        scales = self.scales
        super()._apply(fn, recurse)
        if self.scales.dtype != scales.dtype:
            self.scales = scales.to(self.scales.device)
        return self
