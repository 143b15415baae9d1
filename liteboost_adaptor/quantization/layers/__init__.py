"""Modules with quantized weights, and what transformers and PEFT do to them."""

from .base import QuantizedLayer
from .experts import QuantizedExperts
from .linear import QuantizedLinear
from .weight_shape import ShardedWeight, WeightShape

__all__ = ["QuantizedExperts", "QuantizedLayer", "QuantizedLinear", "ShardedWeight", "WeightShape"]
