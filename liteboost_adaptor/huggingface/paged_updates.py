"""Updates of a paged cache that modules make themselves, put off until somebody reads what they give.

Since transformers 5.24 a module appends to the cache and hands on what all requests read, gathered; before,
attention did both. Gathering is what takes the time: an attention of ours writes the new keys and values, and
reads pages where they lie (`paged.attention`). So an update gives tensors that stand for its results.
Attention of ours knows them; whoever else touches one has the update made then, and reads what it gave.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ..kv_cache import bind
from ..program.ragged import RaggedBatch

#: Where transformers has its cache in pages.
CACHES = "transformers.generation.continuous_batching.cache"
_own = threading.local()


class Update:
    """One call of ``cache.update``.

    Attributes:
        cache: The cache, or what stands for it while a step is recorded.
        key, value: New keys and values, ``[1, kv_heads, tokens, head_dim]``.
        layer: Whose.
        kwargs: Those of the module, which describe the batch.
        is_made: Whether the cache has the new keys and values.
    """

    __slots__ = ("_results", "_undo", "cache", "is_made", "key", "kwargs", "layer", "value")

    def __init__(self, cache: Any, key: Tensor, value: Tensor, layer: int, kwargs: dict[str, Any]) -> None:
        self.cache, self.key, self.value, self.layer, self.kwargs = cache, key, value, layer, kwargs
        self.is_made, self._undo = False, None
        self._results: tuple[Tensor, Tensor] | None = None

    def note_made(self, undo: Callable[[], None] | None = None) -> None:
        """The cache has the new keys and values.

        Args:
            undo: Takes them out again, where to write the same once more would change what is read.
        """
        self.is_made, self._undo = True, undo
        if getattr(_own, "last", None) is self:
            _own.last = None

    def results(self) -> tuple[Tensor, Tensor]:
        """What the cache gives."""
        if self._results is None:
            if self._undo is not None:
                self._undo()
            self.note_made()
            self._results = self.cache.update(self.key, self.value, self.layer, kwargs=self.kwargs)
        return self._results


class Awaited(Tensor):
    """Stands for one result of an `Update`, and has no memory."""

    update: Update
    index: int

    @staticmethod
    def of(update: Update, index: int) -> Awaited:
        new = (update.key, update.value)[index]
        made = Tensor._make_wrapper_subclass(Awaited, new.shape, dtype=new.dtype, device=new.device)
        made.update, made.index = update, index
        return made

    def result(self) -> Tensor:
        return self.update.results()[self.index]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_made(args), **_made(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_made(args), **_made(kwargs or {}))


def _made(values: Any) -> Any:
    return pytree.tree_map_only(Awaited, Awaited.result, values)


class _PuttingOff:
    """Stands for a paged cache in ``cache.update(...)``."""

    __slots__ = ("cache",)

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def update(self, key_states: Any, value_states: Any, layer_idx: Any, *args: Any, **extra: Any) -> Any:
        kwargs = extra.get("kwargs")
        are_states = isinstance(key_states, Tensor) and isinstance(value_states, Tensor)
        is_plain = are_states and type(layer_idx) is int and type(kwargs) is dict
        if args or extra.keys() != {"kwargs"} or not is_plain:
            return self.cache.update(key_states, value_states, layer_idx, *args, **extra)
        update = Update(self.cache, key_states, value_states, layer_idx, kwargs)
        _own.last = update
        return Awaited.of(update, 0), Awaited.of(update, 1)


def finish() -> None:
    """Make the last update of this thread, if nobody has read what it gives."""
    update = getattr(_own, "last", None)
    if update is not None:
        update.results()


def finishing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` of a model, behind which no update is left to be made."""

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        finish()
        return result

    return call


def put_off(is_served: Callable[[Any], bool]) -> None:
    """Put off updates of modules of which ``is_served`` says that attention of ours reads the results."""

    def receiver(cache: Any, module: Any) -> Any:
        finish()
        return _PuttingOff(cache) if is_served(module) else cache

    bind.serve_others(_is_paged, receiver)


def _is_paged(cache: Any) -> bool:
    return type(cache) is RaggedBatch or type(cache).__module__ == CACHES


def taken(key: Any, value: Any) -> Update | None:
    """The update whose results ``key`` and ``value`` stand for, if they do and nobody has had it made."""
    if type(key) is not Awaited or type(value) is not Awaited or key.update is not value.update:
        return None
    return key.update if (key.index, value.index) == (0, 1) and not key.update.is_made else None
