"""The floating-point parameter that quantized weights replace: its shape, as a linear layer or as experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ...ops.quantized_linear import TILE
from ..schemes import QuantizedTensor, QuantScheme, quantize


@dataclass(frozen=True)
class WeightShape:
    """The shape of a parameter with the weights of all experts, and of the matrix that it is quantized as.

    The parameter is ``[num_experts, out_features, in_features]``, or transposed ``[num_experts, in_features,
    out_features]``. The matrix is ``[num_experts * out_features, in_features]``: experts one below the other.
    A linear layer counts as one expert.
    """

    num_experts: int
    out_features: int
    in_features: int
    is_transposed: bool

    @classmethod
    def of(cls, parameter: Tensor, is_transposed: bool) -> WeightShape:
        """Of a parameter of experts."""
        return cls(*(parameter.mT if is_transposed else parameter).shape, is_transposed)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the parameter of experts."""
        if self.is_transposed:
            return self.num_experts, self.in_features, self.out_features
        return self.num_experts, self.out_features, self.in_features

    @property
    def rows(self) -> int:
        """Of the matrix."""
        return self.num_experts * self.out_features

    def why_unsupported(self, scheme: QuantScheme) -> str:
        """Why experts of this shape cannot have ``scheme``, or an empty string."""
        if self.out_features % TILE:
            return f"out_features = {self.out_features} of an expert is not a multiple of {TILE}"
        return scheme.why_unsupported(self.out_features, self.in_features)

    def matrix(self, parameter: Tensor) -> Tensor:
        """``[num_experts * out_features, in_features]``; a copy where the parameter is transposed."""
        return (parameter.mT if self.is_transposed else parameter).reshape(-1, self.in_features)

    def parameter(self, matrix: Tensor) -> Tensor:
        """As the model has it."""
        whole = matrix.view(-1, self.out_features, self.in_features)
        return whole.mT.contiguous() if self.is_transposed else whole

    def quantize(self, parameter: Tensor, scheme: QuantScheme, name: str) -> QuantizedTensor:
        """Each expert rounded by itself, which copies one at a time. Raises as `rounding.quantize` does."""
        plain = parameter.mT if self.is_transposed else parameter
        # Contiguous: sums over columns are then made in the order of a linear layer's.
        return QuantizedTensor.cat([quantize(expert.contiguous(), scheme, name) for expert in plain])


@dataclass(frozen=True)
class ShardedWeight:
    """A weight that is quantized while a model is loaded, and of which another process keeps the rest.

    Attributes:
        shape: Of what is read; of a linear layer one expert.
        scheme: It is quantized to.
        shard_shape: Of what is kept of the result.
        shard_scheme: Of that: groups may be smaller.
        take_shard: From what is quantized to what is kept.
    """

    shape: WeightShape
    scheme: QuantScheme
    shard_shape: WeightShape
    shard_scheme: QuantScheme
    take_shard: Callable[[QuantizedTensor], QuantizedTensor]
