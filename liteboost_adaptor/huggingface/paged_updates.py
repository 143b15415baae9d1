"""Updates of a paged cache that modules make themselves, put off until attention.

Since transformers 5.24 a module appends to the cache and hands attention what all requests read, gathered;
before, attention did both. Gathering is what takes the time: an attention of ours writes the new keys and
values, and reads pages where they lie (`paged.attention`). So where a module does nothing with the results
of its update but hand them to attention (`engine.handed_on`), and the entry of the registry is ours, the
update is left to that.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..errors import LiteBoostError
from ..kv_cache import bind
from ..program.ragged import RaggedBatch

#: Where transformers has its cache in pages.
CACHES = "transformers.generation.continuous_batching.cache"
_own = threading.local()


class PagedUpdateError(LiteBoostError, RuntimeError):
    """Attention of somebody else has been given keys that the cache has not gathered."""


class Update:
    """One call of ``cache.update`` that attention is to make.

    Attributes:
        cache: The cache, or what stands for it while a step is recorded.
        key, value: New keys and values, ``[1, kv_heads, tokens, head_dim]``.
        layer: Whose, as the cache counts them.
        undo: Takes them out of the cache again, where to write the same once more would change what is read.
    """

    __slots__ = ("cache", "key", "layer", "undo", "value")

    def __init__(self, cache: Any, key: Tensor, value: Tensor, layer: int) -> None:
        self.cache, self.key, self.value, self.layer = cache, key, value, layer
        self.undo: Callable[[], None] | None = None


class _PuttingOff:
    """Stands for a paged cache in ``cache.update(...)``."""

    __slots__ = ("cache",)

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def update(self, key_states: Any, value_states: Any, layer_idx: Any, kwargs: Any) -> Any:
        are_states = isinstance(key_states, Tensor) and isinstance(value_states, Tensor)
        if not are_states or type(layer_idx) is not int or key_states is value_states:
            return self.cache.update(key_states, value_states, layer_idx, kwargs=kwargs)
        _own.update = Update(self.cache, key_states, value_states, layer_idx)
        return key_states, value_states


def put_off(is_served: Callable[[Any], bool]) -> None:
    """Put off updates of modules of which ``is_served`` says that they are to call attention of ours."""

    def receiver(cache: Any, module: Any, is_handed_on: bool) -> Any:
        drop()  # of a forward that an exception has ended
        return _PuttingOff(cache) if is_handed_on and is_served(module) else cache

    bind.serve_others(_is_paged, receiver)


def _is_paged(cache: Any) -> bool:
    return type(cache) is RaggedBatch or type(cache).__module__ == CACHES


def given(key: Any, value: Any) -> Update | None:
    """The update that is to be made with ``key`` and ``value``, if there is one."""
    update = getattr(_own, "update", None)
    return update if update is not None and update.key is key and update.value is value else None


def drop() -> None:
    """The update of this thread is made, or will not be."""
    _own.update = None


def gathering(original: Callable[..., Any]) -> Callable[..., Any]:
    """``original``, an entry of the registry, with the update that it was left to others to make."""

    @functools.wraps(original)
    def call(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        update = given(key, value)
        if update is not None:
            drop()
            if update.undo is not None:
                update.undo()
            key, value = update.cache.update(key, value, update.layer, kwargs=kwargs)
        return original(module, query, key, value, *args, **kwargs)

    return call


def finishing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` of a model, which leaves no update to be made.

    Raises:
        PagedUpdateError: Attention has not made it.
    """

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = forward(*args, **kwargs)
            is_left = getattr(_own, "update", None) is not None
        finally:
            drop()
        if is_left:
            raise PagedUpdateError(
                "an entry of AttentionInterface was exchanged while a model called it; run the batch again"
            )
        return result

    return call
