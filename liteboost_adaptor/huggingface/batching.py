"""``generate_batch`` of a bound model: a cache as large as its requests fill, and no look through all memory.

transformers takes 0.9 of the memory that is free for the cache where nobody says how large it is, and on a
CPU fills that with zeros and a mask of its size with numbers, before the first token. At its end it collects
garbage twice, among all that the modules of torch and transformers hold.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

from .. import thread_pool
from ..report import CallCounter
from .steps import generates

#: Free pages beside those that are filled: a scheduler begins no further prompt where few are free.
_ROOM, _SPARE = 2, 4
#: Requests that would fill a larger part of the free memory are left to transformers, which makes some wait.
_LARGEST = 0.3
#: Prompts of fewer tokens in all are read in one batch, and no batch behind it has more; or as many as this.
_ONE_BATCH, _LEAST = 4096, 64


def batches(cls: type) -> bool:
    """Whether models of ``cls`` generate and have the method."""
    return generates(cls) and callable(getattr(cls, "generate_batch", None))


def generate_batch(original: Callable[..., Any], counter: CallCounter) -> Callable[..., Any]:
    """The method; a cache for a manager that is kept for further requests is sized by transformers."""

    @functools.wraps(original)
    def generate_batch(
        self: Any,
        inputs: Any,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        counter.count_served()
        if not kwargs.get("persistent_manager", len(args) > 2 and args[2]):
            most = kwargs.get("max_new_tokens")
            continuous_batching_config = sized(
                self, inputs, generation_config, continuous_batching_config, most
            )
        with set_aside():
            return original(self, inputs, generation_config, continuous_batching_config, *args, **kwargs)

    return generate_batch


def init_continuous_batching(original: Callable[..., Any], counter: CallCounter) -> Callable[..., Any]:
    """The method; when a manager starts its thread, those for operators of the one that waits are let go."""

    @functools.wraps(original)
    def init_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> Any:
        counter.count_served()
        manager = original(self, *args, **kwargs)
        if callable(getattr(type(manager), "start", None)):
            manager.__class__ = _computing_alone(type(manager))
        return manager

    return init_continuous_batching


@functools.cache
def _computing_alone(cls: type[Any]) -> type:
    """The class of a manager that takes the place of one of ``cls``; of one of ours that itself."""
    if issubclass(cls, _ComputingAlone):
        return cls
    return type(cls.__name__, (_ComputingAlone, cls), {"__module__": cls.__module__})


class _ComputingAlone:
    """Starts its thread when this one has none beside it (`thread_pool`), and wakes it where it is to end."""

    def start(self, *args: Any, **kwargs: Any) -> Any:
        thread_pool.release()
        return super().start(*args, **kwargs)  # type: ignore[misc] # of the class beside it

    def join(self, *args: Any, **kwargs: Any) -> Any:
        # It would look for its end 0.1 s after the last request.
        if callable(wake := getattr(getattr(self, "_wake_up_loop", None), "set", None)):
            wake()
        return super().join(*args, **kwargs)  # type: ignore[misc]


def sized(model: Any, inputs: Any, generation: Any, batching: Any, most: int | None) -> Any:
    """``batching`` with the sizes of a cache and of a batch for ``inputs``, where it does not say them.

    Args:
        inputs: The prompts.
        generation: The generation config, or None for the model's.
        batching: The continuous batching config, or None for the default.
        most: ``max_new_tokens`` of the call, or None.
    """
    generation = model.generation_config if generation is None else generation
    most = getattr(generation, "max_new_tokens", None) if most is None else most
    in_generation = getattr(generation, "continuous_batching_config", None)
    if model.device.type != "cpu" or most is None or not inputs or (batching is None and in_generation):
        return batching
    if batching is None:
        from transformers import ContinuousBatchingConfig

        batching = ContinuousBatchingConfig()
    made, copies = copy.deepcopy(batching), getattr(generation, "num_return_sequences", None) or 1
    if batching.num_blocks is None and (page_size := getattr(batching, "page_size", None)):
        pages = copies * _ROOM * sum(-(-(len(each) + most) // page_size) for each in inputs) + _SPARE
        if pages * page_size * _bytes_of_a_token(model) > _LARGEST * _free_memory():
            return batching
        made.num_blocks = pages
    tokens = sum(map(len, inputs))
    if made.max_batch_tokens is None and copies == 1 and tokens < _ONE_BATCH:
        made.max_batch_tokens = max(tokens, _LEAST)
    return made


def _bytes_of_a_token(model: Any) -> int:
    """In a cache of all layers."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size * model.dtype.itemsize)


def _free_memory() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """In the block `gc.collect` looks at nothing that exists now; behind it at everything, as before."""
    if gc.get_freeze_count():  # by somebody else, and to take that back would be theirs to do
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
