"""The op families: schema, checks and reference of each, in one module a family.

The ops themselves are ``torch.ops.liteboost.*``. The native library defines them; without it
`register_reference_ops` defines the same names on the references.
"""

from . import (
    activation,
    attention,
    attention_part,
    cache,
    causal_conv,
    delta_rule,
    experts,
    fused_experts,
    head_linear,
    int8_attention,
    int8_linear,
    latent_attention,
    linear,
    norm,
    paged_attention,
    quantize_weight,
    quantized_experts,
    quantized_linear,
    rope,
    softcap_attention,
    sparse_attention,
)
from .registry import Op, define, npu_ops, op_named, ops, register_reference_ops

__all__ = [
    "Op",
    "activation",
    "attention",
    "attention_part",
    "cache",
    "causal_conv",
    "define",
    "delta_rule",
    "experts",
    "fused_experts",
    "head_linear",
    "int8_attention",
    "int8_linear",
    "latent_attention",
    "linear",
    "norm",
    "npu_ops",
    "op_named",
    "ops",
    "paged_attention",
    "quantize_weight",
    "quantized_experts",
    "quantized_linear",
    "register_reference_ops",
    "rope",
    "softcap_attention",
    "sparse_attention",
]
