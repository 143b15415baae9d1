"""LoRA of PEFT over quantized layers. Imported only where PEFT is."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ...config import Settings
from ...errors import QuantizationError
from .linear import QuantizedLinear

if TYPE_CHECKING:
    from ...engine.undo_stack import UndoStack

_MODEL = "peft.tuners.lora.model"


def extend(stack: UndoStack, settings: Settings) -> None:
    """Let PEFT, which has been imported, wrap quantized layers."""
    if hasattr(sys.modules.get(_MODEL), "dispatch_default"):
        stack.set_attribute(_MODEL, "dispatch_default", _dispatching)


def _dispatching(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def dispatch_default(target: torch.nn.Module, adapter_name: str, config: Any, **kwargs: Any) -> Any:
        base = target.get_base_layer() if hasattr(target, "get_base_layer") else target
        if not isinstance(base, QuantizedLinear) or kwargs.get("parameter_name") is not None:
            return original(target, adapter_name, config=config, **kwargs)
        if getattr(config, "use_dora", False):
            raise QuantizationError(
                "DoRA needs the weight in floating point, and this layer has integers: use LoRA without "
                "use_dora, or model.dequantize() first"
            )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Unsupported layer type")
            return _layer_class()(target, adapter_name, config=config, **kwargs)

    return dispatch_default


@functools.cache
def _layer_class() -> type:
    from peft.tuners.lora.layer import Linear

    class QuantizedLora(Linear):
        """An adapter beside a quantized layer; what it adds is never merged into the integers."""

        def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
            raise QuantizationError(
                "an adapter cannot be merged into weights of 8 or 4 bits: merge it into the model that was "
                "quantized, or model.dequantize() before the adapter is added"
            )

    QuantizedLora.__qualname__ = QuantizedLora.__name__
    return QuantizedLora
