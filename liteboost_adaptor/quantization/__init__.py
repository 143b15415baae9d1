"""Weights of 8 and 4 bits: schemes, layers that keep them, and the quantizer that transformers calls."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["LiteBoostConfig", "QuantScheme", "QuantizedLinear", "quantize_model"]

#: Where each name is; none is imported before it is asked for, for these import torch and transformers.
_WHERE = {
    "LiteBoostConfig": "config",
    "QuantizedLinear": "layers",
    "QuantScheme": "schemes",
    "quantize_model": "model",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
