"""DDP and FSDP get unsharded models: they need all parameters in every process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import wrapt
from torch import nn

from ..runtime import groups
from . import unsharded

if TYPE_CHECKING:
    from ...engine.undo_stack import UndoStack

_FSDP = "torch.distributed.fsdp"


def hook(stack: UndoStack, is_active: Callable[[], bool]) -> None:
    """Unshard models before they are wrapped.

    Args:
        is_active: Whether what is set is still in force when a wrapper is imported.
    """
    stack.set_attribute("torch.nn.parallel.distributed", "DistributedDataParallel.__init__", _wrap_init)

    def follow(_: Any) -> None:
        if is_active():
            stack.set_attribute(_FSDP, "FullyShardedDataParallel.__init__", _wrap_init)
            stack.set_attribute(_FSDP, "fully_shard", _wrap_function)

    wrapt.register_post_import_hook(follow, _FSDP)


def _wrap_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        unshard_wrapped(module, type(self).__name__)
        original(self, module, *args, **kwargs)

    return __init__


def _wrap_function(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
        unshard_wrapped(module, "fully_shard")
        return original(module, *args, **kwargs)

    return fully_shard


def unshard_wrapped(module: Any, wrapper: str) -> None:
    """Unshard every sharded model that ``module`` is, contains, or is a part of.

    Raises:
        ParallelError: That is impossible.
    """
    parts = {part for each in _listed(module) for part in each.modules()}
    for model in unsharded.sharded_models():
        if parts & set(model.modules()):
            groups.divergence.reason = (
                groups.divergence.reason or f"{wrapper} shares the work of the processes"
            )
            unsharded.unshard(model, groups.divergence.reason)


def _listed(module: Any) -> list[nn.Module]:
    given = module if isinstance(module, (list, tuple)) else [module]
    return [each for each in given if isinstance(each, nn.Module)]
