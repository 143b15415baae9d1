"""The tensors of a quantized weight, as checkpoints have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...ops.quantized_linear import (
    dequantize_w4,
    dequantize_w8,
    pack_w4,
    prepack,
    prepack_scales,
    unpack,
    unpack_scales,
)
from .scheme import QuantScheme


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized weight ``[out, in]``.

    Attributes:
        weight: int8 ``[out, in]``, or uint8 ``[out, in / 2]``, two of 4 bits to a byte (`pack_w4`).
        scales: ``[out]``, or ``[out, groups]``.
        zero_points: uint8 like ``scales``, or None.
    """

    weight: Tensor
    scales: Tensor
    zero_points: Tensor | None = None

    @classmethod
    def pack(cls, integers: Tensor, scales: Tensor, zeros: Tensor, scheme: QuantScheme) -> QuantizedTensor:
        """Of integers ``[out, in]``, scales and zero points as rounding gives them."""
        if scheme.bits == 8:
            return cls(integers.to(torch.int8), scales[:, 0].to(scheme.scale_dtype))
        packed = pack_w4((integers + 8 if scheme.symmetric else integers).to(torch.uint8))
        zero_points = None if scheme.symmetric else zeros.to(torch.uint8)
        return cls(packed, scales.to(scheme.scale_dtype), zero_points)

    @classmethod
    def cat(cls, parts: list[QuantizedTensor]) -> QuantizedTensor:
        """Weights one below the other."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            **{name: torch.cat([part.tensors()[name] for part in parts]) for name in parts[0].tensors()}
        )

    def tensors(self) -> dict[str, Tensor]:
        """By the names of a layer's buffers."""
        found = {"weight": self.weight, "scales": self.scales}
        return found if self.zero_points is None else {**found, "zero_points": self.zero_points}

    def map(self, function: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        """With ``function`` applied to each tensor."""
        return QuantizedTensor(**{name: function(tensor) for name, tensor in self.tensors().items()})

    def rows(self, first: int, last: int) -> QuantizedTensor:
        """Some of the outputs (of a prepacked weight, some of the tiles)."""
        return self.map(lambda tensor: tensor[first:last])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight ``[out, in]`` in floating point."""
        if self.weight.dtype == torch.int8:
            return dequantize_w8(self.weight, self.scales, dtype)
        return dequantize_w4(self.weight, self.scales, self.zero_points, dtype)

    def prepack(self) -> QuantizedTensor:
        """In tiles, as a CPU reads them."""
        zeros = self.zero_points
        return QuantizedTensor(
            prepack(self.weight),
            prepack_scales(self.scales),
            None if zeros is None else prepack_scales(zeros),
        )

    def unpack(self, out_features: int, in_features: int) -> QuantizedTensor:
        """The inverse of `prepack`."""
        scales, zeros = unpack_scales(self.scales, out_features), self.zero_points
        return QuantizedTensor(
            unpack(self.weight, out_features, in_features),
            scales[:, 0] if self.weight.dtype == torch.int8 else scales,
            None if zeros is None else unpack_scales(zeros, out_features),
        )
