"""What ranks do with models of integers."""

from __future__ import annotations

from typing import Any

import torch
from parallel.jobs import _quiet, _recorded_steps
from transformers import AutoModelForCausalLM

from liteboost_adaptor.parallel.layers import QuantizedSum
from liteboost_adaptor.program import step
from liteboost_adaptor.quantization import QuantizedLinear


@torch.no_grad()
def load(folders: list[str], length: int) -> dict[str, Any]:
    """Of each folder: the tokens it writes, logits of a prompt, and what this rank holds of the integers."""
    _quiet()
    step.RECORDED_AT = 3
    found = {}
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ids = torch.arange(5, 25)[None]
        before = _recorded_steps()
        tokens = model.generate(ids, max_new_tokens=length, do_sample=False)
        layers = [each for each in model.modules() if isinstance(each, QuantizedLinear)]
        found[folder] = {
            "tokens": tokens.tolist(),
            "logits": model(input_ids=ids).logits.flatten().tolist(),
            "held": sum(layer.weight.nbytes for layer in layers),
            "layers": len(layers),
            "recorded": _recorded_steps() - before,
            "divided": any(isinstance(each, QuantizedSum) for each in layers),
        }
    return found
