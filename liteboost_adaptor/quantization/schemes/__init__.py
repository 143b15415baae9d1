"""What a weight is quantized to: schemes, the tensors of a quantized weight, and rounding to nearest.

A further scheme is named in `setting_values` and `config.METHODS`, described by `QuantScheme`, rounded to in
`rounding` and multiplied in `layers.linear` and `layers.experts`.
"""

from .rounding import quantize
from .scheme import QuantScheme
from .tensor import QuantizedTensor

__all__ = ["QuantScheme", "QuantizedTensor", "quantize"]
