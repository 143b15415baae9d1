"""Cases of every op, one module a family; importing this package fills the table in `selftest.case`.

Every argument must matter: an eps of the size of the mean square, an offset, not as many heads as positions.
What is wrong about an operator then shows, whatever it is.
"""

from . import (
    activation,
    attention,
    cache,
    causal_conv,
    delta_rule,
    experts,
    head_linear,
    int8_attention,
    int8_linear,
    linear,
    norm,
    paged_attention,
    quantize_weight,
    quantized_experts,
    quantized_linear,
    rope,
    sparse_attention,
)

__all__ = [
    "activation",
    "attention",
    "cache",
    "causal_conv",
    "delta_rule",
    "experts",
    "head_linear",
    "int8_attention",
    "int8_linear",
    "linear",
    "norm",
    "paged_attention",
    "quantize_weight",
    "quantized_experts",
    "quantized_linear",
    "rope",
    "sparse_attention",
]
