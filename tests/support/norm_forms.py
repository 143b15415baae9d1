"""Norms of few families, as their modeling files write them, and how one is made."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import torch
from torch import nn

SIZE = 64


def family_class(family: str, name: str) -> type[nn.Module]:
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)


#: Name -> (rule, family, class, positional and keyword arguments of the class).
FORMS: dict[str, tuple[str, str, str, tuple, dict]] = {
    "CPM-Ant": ("rms_eps", "cpmant", "CpmAntLayerNorm", (SimpleNamespace(eps=1e-6, hidden_size=SIZE),), {}),
    "Moshi": ("rms_late_eps", "moshi", "MoshiRMSNorm", (SIZE,), {}),
    "Gemma 4": ("rms_optional", "gemma4", "Gemma4RMSNorm", (SIZE,), {}),
    "Gemma 4 without weight": ("rms_optional", "gemma4", "Gemma4RMSNorm", (SIZE,), {"with_scale": False}),
    "T5": ("rms_t5", "t5", "T5LayerNorm", (SIZE,), {}),
    "Muse Spark": ("rms_centred_rounded", "muse_spark", "MuseSparkTextCenteredRMSNorm", (SIZE,), {}),
    "Muse Spark, scaled input": (
        "rms_scaled_input",
        "muse_spark",
        "MuseSparkTextInputScaledRMSNorm",
        (SIZE,),
        {},
    ),
    "Qwen4-Exp": ("rms_grouped", "qwen4_exp", "Qwen4ExpTextRMSNorm", (SIZE,), {}),
    "Qwen4-Exp in groups": ("rms_grouped", "qwen4_exp", "Qwen4ExpTextRMSNorm", (SIZE, 16), {}),
    "DeepSeek-V4": ("rms_rounded_factor", "deepseek_v4", "DeepseekV4UnweightedRMSNorm", (), {}),
    "Inkling-2": ("rms_plain", "inkling2", "Inkling2UnweightedRMSNorm", (), {}),
    "Dory": ("l2", "dory", "DoryL2Norm", (), {}),
    "HY-V4": ("rms_factor", "hy_v4", "HYV4UnweightedRMSNorm", (), {}),
    "xLSTM": ("rms_biased", "xlstm", "xLSTMRMSNorm", (SIZE,), {}),
    "xLSTM with bias": ("rms_biased", "xlstm", "xLSTMRMSNorm", (SIZE,), {"use_bias": True}),
    "xLSTM without weight": ("rms_biased", "xlstm", "xLSTMRMSNorm", (SIZE,), {"use_weight": False}),
    "Nemotron": ("layer_centred", "nemotron", "NemotronLayerNorm1P", (SIZE,), {}),
    "VideoPrism": ("layer_centred", "videoprism", "VideoPrismLayerNorm", (SIZE,), {}),
    "OLMo": ("layer_plain", "olmo", "OlmoLayerNorm", (SIZE,), {}),
    "Chameleon": ("layer_then_affine", "chameleon", "ChameleonLayerNorm", ((5, SIZE),), {}),
    "GOT-OCR2": ("layer_channels", "got_ocr2", "GotOcr2LayerNorm", (SIZE,), {}),
}

#: Forms whose input has four dimensions: what `FORMS` has, and the shape of the input.
IMAGES: dict[str, tuple[tuple[str, str, str, tuple, dict], tuple[int, ...]]] = {
    "xLSTM heads": (("layer_heads", "xlstm", "xLSTMMultiHeadLayerNorm", (3, SIZE), {}), (2, 5, 3, SIZE)),
    "xLSTM heads with bias": (
        ("layer_heads", "xlstm", "xLSTMMultiHeadLayerNorm", (3, SIZE), {"use_bias": True}),
        (2, 5, 3, SIZE),
    ),
    "channels first": (
        ("layer_channels", "convnext", "ConvNextLayerNorm", (7,), {"data_format": "channels_first"}),
        (2, 7, 3, 5),
    ),
    "channels last": (("layer_channels", "sam", "SamLayerNorm", (7,), {}), (2, 3, 5, 7)),
}


#: Norms with a second input, as `IMAGES`.
GATED = {"Falcon-H1": (("gate_switched", "falcon_h1", "FalconH1RMSNormGated", (SIZE,), {}), (2, 5, SIZE))}


def made(family: str, name: str, arguments: tuple, keywords: dict, dtype: torch.dtype) -> nn.Module:
    """A module with weights that are neither 0 nor 1."""
    module = family_class(family, name)(*arguments, **keywords)
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.5 + 0.7).to(dtype)
    return module.requires_grad_(False)
