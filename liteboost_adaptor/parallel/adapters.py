"""PEFT around a sharded model: it is unsharded first, or refused, as for ``add_adapter``.

PEFT makes its layers of the sizes of those that are there, which are those of shards. Imported where PEFT is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..config import Settings
from . import shard

if TYPE_CHECKING:
    from ..engine.undo_stack import UndoStack
    from ..huggingface.runtime import Runtime

_MODULE = "peft.peft_model"


def register(runtime: Runtime) -> None:
    """Look at models that PEFT wraps while ``runtime`` prepares models."""
    runtime.extend(_extend)


def _extend(stack: UndoStack, settings: Settings) -> None:
    if hasattr(sys.modules.get(_MODULE), "PeftModel"):
        stack.set_attribute(_MODULE, "PeftModel.__init__", _unsharding)


def _unsharding(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        shard.unshard_for_adapters(model, type(self).__name__)
        original(self, model, *args, **kwargs)

    return __init__
