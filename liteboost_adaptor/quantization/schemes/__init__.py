"""What a weight is quantized to: schemes, the tensors of a quantized weight, and rounding to nearest."""

from .rounding import quantize
from .scheme import QuantScheme
from .tensor import QuantizedTensor

__all__ = ["QuantScheme", "QuantizedTensor", "quantize"]
