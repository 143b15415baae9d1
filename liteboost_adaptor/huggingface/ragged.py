"""Recorded steps of continuous batching: what a program is given of a batch.

A batch is described once (`paged.groups_of`); block tables, where new keys are written, and the pages
themselves are arguments of a program. Nothing computes with the mask: it was compared with what the requests'
causality hides, which attention does by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..kv_cache import buffers
from ..program import ragged
from ..program.ragged import RaggedBatch
from ..program.step_call import StepCall
from . import paged
from .paged_updates import CACHES

#: What only attention reads: it has `paged.Group` in its place.
_OF_ATTENTION = frozenset(
    {
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "read_index", "write_index"),
        *("block_table", "logits_processor_args"),
    }
)
_MASK = "attention_mask"
#: Tokens, and which of them logits are wanted of: arguments that have a size for either.
_TOKENS, _WANTED = "input_ids", ("logits_to_keep", "logits_indices")
_PLAIN = (bool, int, float, str, type(None))
#: Of prompts, in a batch with requests that decode: with more, arithmetic takes all the time, and to check a
#: step takes as much once more.
_PROMPT_TOKENS = 256

ON_DEVICE = "continuous batching is recorded on a CPU only"


class _Unread:
    """Stands for an argument that only attention reads."""


_unread = _Unread()


def is_paged(kwargs: dict[str, Any]) -> bool:
    """Whether the cache that a forward is called with is in pages."""
    cache = kwargs.get("cache")
    return isinstance(cache, RaggedBatch) or type(cache).__module__ == CACHES


def is_ragged(kwargs: dict[str, Any]) -> bool:
    """Whether continuous batching calls a forward, with a cache of the kind that is read here."""
    cache = kwargs.get("cache")
    if type(cache).__module__ != CACHES or not hasattr(cache, "layer_to_allocator"):
        return False  # older ones have no allocators
    return isinstance(getattr(cache, "cache_allocators", None), dict) and paged.has_rules()


def step_of(original: Callable[..., Any], kwargs: dict[str, Any]) -> StepCall | str:
    """The call of ``original`` with ``kwargs`` as a step that may be recorded, or why it may not.

    An empty string: there is nothing to say, as there is not of a prompt.
    """
    cache, groups = kwargs["cache"], paged.groups_of(kwargs["cache"], kwargs)
    if (fault := _fault_of(kwargs.get(_TOKENS), groups)) or groups is None:
        return fault
    if all(group.table is None for group in groups.values()):
        return ""
    requests = max(group.batch.sums_q.numel() for group in groups.values()) - 1
    if kwargs[_TOKENS].shape[1] > requests + _PROMPT_TOKENS:
        return ""
    masks, given = _masks(kwargs.get(_MASK), groups), _given(kwargs)
    if masks is None or isinstance(given, str):
        return "a mask that is not the batch's own" if masks is None else str(given)
    is_copied = any(type(each) is Tensor and each is not kwargs[name] for name, each in given.items())
    numbers = {layer: each.index for layer, each in cache.layer_to_allocator.items()}
    batch = RaggedBatch(cache, numbers, masks)
    own = {**masks, **_read_by_attention(cache, groups)}
    given |= {ragged.NAME: batch, **own}
    growing = _growing(given)
    call = functools.partial(_called, original, kwargs, list(own))
    kept = functools.partial(_new_rows, own, batch.groups)
    # What a cache lacks, a model may have asked for.
    key = (*_key(given, growing), type(cache), *vars(cache))
    return StepCall(call, given, given, key, is_copied, growing, list(masks), kept)


def _fault_of(ids: Any, groups: dict[int, paged.Group] | None) -> str:
    """Why no step of such a batch is recorded, or an empty string."""
    if type(ids) is not Tensor or ids.dim() != 2 or ids.shape[0] != 1:
        return "its tokens are not packed ids"
    if ids.device.type != "cpu":
        return ON_DEVICE
    if groups is None:
        return "no description of the batch"
    return next((each for group in groups.values() if (each := group.reason or group.unrecorded)), "")


def _given(kwargs: dict[str, Any]) -> dict[str, Any] | str:
    """Arguments of the forward as a program is given them, or why it is given none."""
    given: dict[str, Any] = {}
    for name, value in kwargs.items():
        if name in (_MASK, "cache"):
            continue
        if name in _OF_ATTENTION:
            given[name] = None if value is None else _unread
        elif type(value) is Tensor and not value.__dict__:
            given[name] = value.contiguous()
        elif type(value) in _PLAIN:
            given[name] = value
        else:
            return f"{name} is given as a {type(value).__name__}"
    return given


def _read_by_attention(cache: Any, groups: dict[int, paged.Group]) -> dict[str, Tensor]:
    """Arguments of a program: what attention reads of the batch, and the pages."""
    found = {}
    for index, group in groups.items():
        sums = {"sums_q": group.batch.sums_q, "sums_k": group.batch.sums_k}
        of_group = {**sums, "table": group.table, "write": group.write}
        found |= {ragged.named(index, name): each for name, each in of_group.items()}
    for layer, allocator in cache.layer_to_allocator.items():
        of_layer = zip(("keys", "values"), paged.pages_of(allocator, layer), strict=True)
        found |= {ragged.named(layer, name): each for name, each in of_layer}
    return found


def _growing(given: dict[str, Any]) -> dict[str, tuple[int, ...] | None]:
    """Along which dimensions which argument has another size in every run: see `Recorder.input`.

    torch's symbols count from two: a size of one is one in every run.
    """
    lengths: dict[str, tuple[int, ...] | None] = {}
    for name, value in given.items():
        if type(value) is not Tensor:
            continue
        if name.startswith(f"{ragged.NAME}."):
            lengths[name] = (0,) if name.endswith(".write") else None
        elif name.startswith(_MASK):
            lengths[name] = (2, 3)
        elif name in _WANTED:
            lengths[name] = (0,)
        elif value.dim() == 2 and value.shape == given[_TOKENS].shape:
            lengths[name] = (1,)
    return {
        name: None if dims is None else tuple(dim for dim in dims if given[name].shape[dim] > 1)
        for name, dims in lengths.items()
    }


def _key(given: dict[str, Any], growing: dict[str, tuple[int, ...] | None]) -> Any:
    """What of a batch must be the same for a program to serve it; the pages' shape is what a program asks."""
    found: list[Any] = []
    numbers: dict[int, int] = {}
    for name, value in given.items():
        if type(value) is Tensor:
            dims = growing.get(name, ())
            sizes = value.dim() if dims is None else [n for at, n in enumerate(value.shape) if at not in dims]
            # Equal sizes have one symbol.
            grown = [numbers.setdefault(value.shape[dim], len(numbers)) for dim in dims or ()]
            found += (name, str(sizes), *grown, value.dtype)
        else:
            found += (name, type(value), value if type(value) in _PLAIN else None)
    return tuple(found)


def _called(original: Callable[..., Any], kwargs: dict[str, Any], names: list[str], /, **given: Any) -> Any:
    """``original(**kwargs)``; while that is recorded, with what stands for its arguments in their place."""
    if not buffers.is_recorded():
        return original(**kwargs)
    batch = given.pop(ragged.NAME)
    batch.own = {name: given.pop(name) for name in names}
    masks: dict[str, Any] = {name: batch.own[name] for name in batch.masks}
    if _MASK not in masks:
        masks = {_MASK: {name.removeprefix(f"{_MASK}."): each for name, each in masks.items()}}
    try:
        return original(**given, **masks, cache=batch)
    finally:
        batch.own = {}


def _new_rows(own: dict[str, Tensor], groups: dict[int, int]) -> list[Tensor]:
    """Copies of the keys and values of the batch's tokens, as they lie in the pages."""
    return [
        own[ragged.named(layer, name)].flatten(0, 1)[own[ragged.named(group, "write")]]
        for layer, group in groups.items()
        for name in ("keys", "values")
    ]


def _masks(mask: Any, groups: dict[int, paged.Group]) -> dict[str, Tensor] | None:
    """Arguments with the sizes of the masks and without their values; ``None``: one hides something else."""
    named = mask if isinstance(mask, dict) else {"": mask}
    found = {}
    for kind, each in named.items():
        of_kind = [group for group in groups.values() if not kind or group.kind == kind]
        if not of_kind or not all(group.hides(each) for group in of_kind):
            return None
        # None of the memory that the mask takes.
        found[f"{_MASK}.{kind}" if kind else _MASK] = each.new_zeros(()).expand(each.shape)
    return found
