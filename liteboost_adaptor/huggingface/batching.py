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
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .. import thread_pool
from ..report import CallCounter
from . import huge_pages
from .steps import generates

#: Pages for each that is filled: a scheduler begins no further prompt where fewer than 0.15 of all are free.
_ROOM = 1.2
#: And pages beside them, more where layers are of several kinds.
_SPARE, _SPARE_OF_KINDS = 1, 4
#: What the bytes of a sector are a multiple of.
_SECTOR_ALIGNMENT = 128
#: Requests that would fill a larger part of the free memory are left to transformers, which makes some wait.
_LARGEST = 0.3
#: Tokens of a batch: those of all prompts, but no more than fill the products, and no fewer than this.
#: Activations of more are tens of MB, which the C library takes anew from the system for each operator.
_MOST, _LEAST = 2048, 64
#: Tokens of a batch where nobody says how many.
_DEFAULT_BATCH = 8192
#: Of the smallest cache that is put on huge pages.
_LEAST_BYTES = 32 << 20
#: Of the time that calls take, what looking through all memory may take.
_SHARE = 0.01


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
        with set_aside() as failed:
            found = original(self, inputs, generation_config, continuous_batching_config, *args, **kwargs)
            # What failed holds the cache by its traceback.
            failed += [getattr(each, "error", None) is not None for each in found.values()]
        return found

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
    """Starts its thread when this one has none beside it (`thread_pool`), and wakes it where it is to end.

    Its cache takes memory where it is used, on huge pages: zeros written to all of it took 0.2 s a GB, and
    to give 4 KiB at a time back half of that.
    """

    def _create_batch_processor(self, *args: Any, **kwargs: Any) -> Any:
        with _CacheOnHugePages():
            return super()._create_batch_processor(*args, **kwargs)  # type: ignore[misc] # as below

    def start(self, *args: Any, **kwargs: Any) -> Any:
        thread_pool.release()
        return super().start(*args, **kwargs)  # type: ignore[misc] # of the class beside it

    def join(self, *args: Any, **kwargs: Any) -> Any:
        # It would look for its end 0.1 s after the last request.
        if callable(wake := getattr(getattr(self, "_wake_up_loop", None), "set", None)):
            wake()
        return super().join(*args, **kwargs)  # type: ignore[misc]


class _CacheOnHugePages(TorchFunctionMode):
    """While it is entered, many zeros of one byte are on huge pages: the memory of a cache in pages.

    That of the cache before where the caching allocator has kept it (decision 68), as it will keep this.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and len(args) == 1 and kwargs.keys() == {"dtype", "device"}:
            (size,), on = args, kwargs["device"]
            is_bytes = type(size) is int and size >= _LEAST_BYTES and kwargs["dtype"] is torch.uint8
            if is_bytes and on is not None and torch.device(on).type == "cpu":
                # Torch says better what it has no memory for.
                with contextlib.suppress(OSError):
                    kept = torch.ops.liteboost._kept_zeros(size)
                    return kept[0] if kept else huge_pages.zeros(size)
        return func(*args, **kwargs)


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
    tokens = sum(map(len, inputs))
    if made.max_batch_tokens is None and copies == 1:
        made.max_batch_tokens = min(max(tokens, _LEAST), max(_MOST, len(inputs)))
    page_size = getattr(batching, "page_size", None)
    if page_size and batching.num_blocks is None and getattr(batching, "max_memory_percent", None) is None:
        filled = copies * sum(-(-(len(each) + most) // page_size) for each in inputs)
        pages = _pages_of_a_cache(model, math.ceil(_ROOM * filled), page_size)
        rows = made.max_batch_tokens or _DEFAULT_BATCH
        needed = _bytes_of_a_cache(model, pages * page_size, rows, copies * len(inputs))
        if needed > _LARGEST * _free_memory():
            return batching
        made.num_blocks = pages
    return made


def _pages_of_a_cache(model: Any, filled: int, page_size: int) -> int:
    """Pages of all layers, in a cache in which each kind of layers has ``filled`` pages.

    Each kind takes *sectors*, the smallest memory that pages of every kind divide: with 5 layers of one kind
    and 29 of another 145 pages of a layer, as much as 4.3 pages of all layers, however few it fills.
    """
    config = model.config.get_text_config()
    kinds = Counter(getattr(config, "layer_types", None) or ())
    if len(kinds) < 2:
        return filled + _SPARE
    of_layer = page_size * _bytes_of_a_token(model)
    of_kinds = [layers * of_layer for layers in kinds.values()]
    sector = math.lcm(*of_kinds, _SECTOR_ALIGNMENT)
    sectors = sum(-(-filled * of_kind // sector) for of_kind in of_kinds)
    return max(filled + _SPARE_OF_KINDS, -(-sectors * sector // (config.num_hidden_layers * of_layer)))


def _bytes_of_a_token(model: Any) -> int:
    """Of its key and its value in a layer."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(2 * kv_heads * head_dim * model.dtype.itemsize)


def _bytes_of_a_cache(model: Any, tokens: int, rows: int, requests: int) -> int:
    """What transformers counts for a cache of ``tokens``, or more: see its ``PagedAttentionMemoryHandler``.

    Args:
        rows: Tokens of a batch.
        requests: How many have logits in it at most.
    """
    config, size = model.config.get_text_config(), model.dtype.itemsize
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kept = tokens * config.num_hidden_layers * _bytes_of_a_token(model)
    masks = 2 * rows * (tokens + rows) * size  # of whole keys and of a window
    keeps = getattr(model, "_supports_logits_to_keep", None)
    with_logits = min(requests, rows) if callable(keeps) and keeps() else rows
    logits = with_logits * (4 * config.vocab_size + size * config.hidden_size)
    activations = rows * size * (config.hidden_size + 6 * heads * head_dim)
    return int(kept + masks + logits + activations)


def _free_memory() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


class _Collections:
    """How long calls took since all memory was last looked through for garbage, and how long that took."""

    def __init__(self) -> None:
        self._spent, self._takes = math.inf, 0.0

    def collect(self, is_due: bool, spent: float) -> None:
        """Look through all, if ``is_due``, or if it takes `_SHARE` of what calls ``spent`` since the last."""
        self._spent += spent
        if is_due or self._spent * _SHARE >= self._takes:
            begin = time.monotonic()
            gc.collect()
            self._takes, self._spent = time.monotonic() - begin, 0.0


_collections = _Collections()


@contextlib.contextmanager
def set_aside() -> Iterator[list[bool]]:
    """In the block `gc.collect` looks at nothing that exists now.

    Behind it at everything as before, once where that is due: what was dropped before the block, a model and
    its memory among it, is not in the way of what comes next.

    Yields:
        A list; with anything true in it all is looked through in any case, as it is behind an exception.
    """
    failed: list[bool] = []
    if gc.get_freeze_count():  # by somebody else, and to take that back would be theirs to do
        yield failed
        return
    gc.freeze()
    begin = time.monotonic()
    mark: list[None] = []
    try:
        yield failed
    except BaseException:
        failed.append(True)
        raise
    finally:
        # Or somebody has frozen more meanwhile, the mark among it. To count what is frozen would take 35 ms.
        if any(each is mark for each in gc.get_objects()):
            gc.unfreeze()
            _collections.collect(any(failed), time.monotonic() - begin)
