"""Where we meet PEFT: it calls models in a way of its own, and puts layers into bound models."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..engine import swap
from ..engine.undo_stack import UndoStack

_MODEL = "peft.peft_model"
_TUNER = "peft.tuners.tuners_utils"


def hook_calls(stack: UndoStack, prepare: Callable[[torch.nn.Module], None]) -> None:
    """Hand the model that a called `PeftModel` adapts to ``prepare``, if PEFT is there.

    A PEFT model calls the forward of the model that it adapts, and never the model.
    """
    _hook(stack, _MODEL, "PeftModel", "__call__", lambda original: _call(original, prepare))


def hook_injection(stack: UndoStack, adopt: Callable[[set[torch.nn.Module]], None]) -> None:
    """Hand the layers that PEFT has put into a model to ``adopt``, if PEFT is there.

    `get_peft_model`, `add_adapter` and `load_adapter` of PEFT and of transformers come by here.
    """
    _hook(stack, _TUNER, "BaseTuner", "inject_adapter", lambda original: _injection(original, adopt))


def _hook(stack: UndoStack, module: str, class_name: str, attribute: str, make: Callable[[Any], Any]) -> None:
    found = getattr(getattr(sys.modules.get(module), class_name, None), attribute, None)
    if found is not None and not hasattr(found, swap.MARKER):
        stack.set_attribute(module, f"{class_name}.{attribute}", make)


def _call(original: Callable[..., Any], prepare: Callable[[torch.nn.Module], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and not torch.jit.is_tracing():
            prepare(self.get_base_model())
        return original(self, *args, **kwargs)

    setattr(__call__, swap.MARKER, True)
    return __call__


def _injection(
    original: Callable[..., Any], adopt: Callable[[set[torch.nn.Module]], None]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def inject_adapter(self: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = set(model.modules())
        result = original(self, model, *args, **kwargs)
        adopt(set(model.modules()) - before)
        return result

    setattr(inject_adapter, swap.MARKER, True)
    return inject_adapter
