"""Llamas with random weights, of the sizes that a test asks for."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

#: What `llama` has unless other sizes are asked for.
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 128}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
#: Wide enough for launches and bytes of a layer to be told from those around it.
WIDE = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 1024}
WIDE |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}


def llama(
    dtype: torch.dtype = torch.float32, device: str = "npu", factor: float = 1, **changes: Any
) -> LlamaForCausalLM:
    """The same model at every call.

    Args:
        factor: Of the matrices; at 6 and more, the tokens that greedy decoding gives differ.
        changes: Of the configuration, beside `SIZES`.
    """
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(factor)
    return model.to(dtype).eval().to(device)
