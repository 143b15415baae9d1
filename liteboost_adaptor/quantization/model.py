"""Quantise a model that is loaded already."""

from __future__ import annotations

import torch

from ..errors import QuantizationError
from .choices import choices, note, untie
from .config import LiteBoostConfig
from .conversion import convert, put
from .names import PLAN
from .quantizer import LiteBoostQuantizer


def choose(model: torch.nn.Module, config: LiteBoostConfig) -> None:
    """Let ``model``, which is on the meta device, have what stands for its weights once they are integers."""
    for choice in list(choices(model, config)) if config.scheme else ():
        if choice.scheme is not None:
            put(model, choice)
            if choice.tied:
                untie(model, choice)


def quantize_model(model: torch.nn.Module, config: LiteBoostConfig) -> torch.nn.Module:
    """Quantise a loaded ``model`` in place, layer by layer; each layer's former weight is freed at once.

    Args:
        model: A model of transformers, not quantised, on the CPU.
        config: What to.

    Returns:
        ``model``, which `save_pretrained` writes quantised.

    Raises:
        QuantizationError: It is quantised already, is divided over processes, has no layer for it, or a
            weight cannot be rounded.
    """
    if getattr(vars(model).get(PLAN), "shardings", None):
        raise QuantizationError(
            f"this {type(model).__name__} is divided over processes already, and a rank has only parts of "
            "what has one scale. Quantise it as it is loaded (LITEBOOST_QUANT, or quantization_config)"
        )
    if getattr(model, "hf_quantizer", None) is not None:
        method = model.hf_quantizer.quantization_config.quant_method
        raise QuantizationError(
            f"{type(model).__name__} is quantised already ({getattr(method, 'value', method)}); load it "
            "without that"
        )
    made = list(choices(model, config))
    convert(model, config, made)
    LiteBoostQuantizer(config, pre_quantized=False).claim(model)
    note(model, made)
    return model
