"""Where we meet continuous batching: entries of ``AttentionInterface`` that are handed a paged cache.

transformers writes new keys and values into the cache, gathers all that a request reads into one tensor, and
attends under a mask of every token of the batch against every key. Here keys and values are read where they
lie. What is read and what is hidden is taken from what the model was called with, and checked, once a batch.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..eligibility import autocast, unserved
from ..engine.callees import of_function
from ..engine.fingerprint import Opaque, fingerprint
from ..engine.guarded import PLAIN, TAKES_REFUSAL, watch_over
from ..program import ragged
from ..program.ragged import RaggedBatch
from ..program.stand_in import ReadsArgument
from ..replacements import paged
from ..replacements.attention import has_readers
from ..report import CallCounter
from ..watch import Watch, place_in_class
from . import paged_updates

#: Arguments that change what is computed and that the op does not take.
_UNSERVED_ARGUMENTS = ("block_table", "head_mask", "position_bias", "relative_position_bias", "softcap")
#: Arguments that describe a batch.
_DESCRIBES = {"cu_seq_lens_q", "cu_seq_lens_k", "read_index", "write_index"}
#: Methods of a cache's part for layers of one kind, by which its pages are written and read.
_METHODS = ("update", "register_cache_tensor", "get_cache_for_block_table")

#: Why the keys of a window are left to the cache to gather, which no program does.
WINDOWS = "several new tokens of a request in layers with a window"
RINGS = "keys of a window that do not fill pages in order"


@dataclass
class Group:
    """What one batch does with the cache of the layers of one kind.

    Attributes:
        reason: Why it is not served, or empty.
        kind: That of the layers, as transformers calls it.
        batch: Its requests.
        write: The slot of each query's own key.
        table: The pages of each, or None where keys and values are read packed.
        window: How many keys a query sees at most; 0 for all before it.
        unrecorded: Why such a step is not recorded, or empty.
        masks: Those compared already: by identity and version the outcome, and what keeps the identity.
        on_device: The table beside the pages, and into how many pages each page is split there.
    """

    reason: str
    kind: str
    batch: paged.Batch
    write: Tensor
    table: Tensor | None = None
    window: int = 0
    unrecorded: str = ""
    masks: dict[tuple[int, int], tuple[Any, bool]] = field(default_factory=dict)
    on_device: tuple[Tensor, int] | None = None

    def hides(self, mask: Any) -> bool:
        """Whether ``mask`` is what the requests' causality and window hide."""
        if not isinstance(mask, Tensor):
            return False
        if mask.is_inference():  # such a tensor does not say whether somebody has changed it since
            return paged.is_causal_mask(mask, self.batch, self.window)
        place = (id(mask), mask._version)
        if place not in self.masks:
            self.masks[place] = (mask, paged.is_causal_mask(mask, self.batch, self.window))
        return self.masks[place][1]

    def table_beside(self, pages: Tensor) -> tuple[Tensor, int]:
        if self.table is None or pages.is_cpu:
            return self.table, 1
        if self.on_device is None:
            parts = paged.split_pages(pages.shape[1])
            table = paged.split_table(self.table, parts).to(pages.device, torch.int32)
            self.on_device = table, parts
        return self.on_device


#: Digests of the methods of caches by which keys and values are written, of all rules.
_known: set[str] = set()
#: Ids of the rules.
_rules: set[str] = set()
#: The last batch that each cache was used for, told by the tensor of its lengths.
_batches: weakref.WeakKeyDictionary[Any, tuple[Tensor, dict[int, Group]]] = weakref.WeakKeyDictionary()


def groups_of(cache: Any, kwargs: dict[str, Any]) -> dict[int, Group] | None:
    """What the batch that a forward is called with does with the layers of each kind, by the kind's number.

    ``None`` where ``kwargs`` do not say.
    """
    if not _DESCRIBES <= kwargs.keys():
        return None
    return {
        allocator.index: _group_of(cache, allocator, kwargs) for allocator in cache.cache_allocators.values()
    }


def _group_of(cache: Any, allocator: Any, kwargs: dict[str, Any]) -> Group:
    sums = kwargs["cu_seq_lens_q"]
    last = _batches.get(cache)
    if last is None or last[0] is not sums:
        last = _batches[cache] = (sums, {})
    groups = last[1]
    if allocator.index not in groups:
        groups[allocator.index] = _describe(cache, allocator, kwargs)
    return groups[allocator.index]


def attention(
    original: Callable[..., Any],
    counter: CallCounter,
    *,
    rule: str,
    known: list[str],
    sinks: str = "",
    has_weights: bool = False,
) -> Callable[..., tuple[Tensor, Any]]:
    """An entry of the registry, for calls with a paged cache; the others are the original's.

    Args:
        original: The entry as it was.
        counter: Counts the calls with a paged cache.
        rule: Id of the rule, which a served module is marked with.
        known: Digests of the methods of caches by which keys and values are written.
        sinks: Attribute of the module that holds one sink logit a head, or empty: the original reads none.
        has_weights: Whether the original returns attention weights, which a hook of the module may read.
    """
    _known.update(known)
    _rules.add(rule)
    paged_updates.put_off(_is_served)
    plain = paged_updates.gathering(original)

    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        liteboost_refusal: str = "",
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        update = paged_updates.given(key, value)
        cache = kwargs.get("cache") if update is None else update.cache
        if cache is None or torch.compiler.is_compiling() or not _is_marked(module, rule):
            return plain(module, query, key, value, attention_mask, *args, **kwargs)
        layer = module.layer_idx if update is None else update.layer
        logits = getattr(module, sinks, None) if sinks else None
        reason = liteboost_refusal or ("positional arguments beyond the mask" if args else "")
        reason = reason or _unserved(query, key, value, logits, kwargs)
        if has_weights and has_readers(module):
            reason = reason or "attention weights wanted"
        if isinstance(cache, RaggedBatch):
            counter.count_served()
            states = _recorded(cache, layer, key, value, attention_mask, reason)
            paged_updates.drop()
            return paged.attend(query, *states, _scaling(query, kwargs), 0, logits), None
        if not reason:
            allocator = cache.layer_to_allocator[layer]
            group = _group_of(cache, allocator, kwargs)
            reason = group.reason
            if not reason and not group.hides(attention_mask):
                reason = "a mask that is not the batch's own"
        if reason:
            counter.count_fallback(reason)
            return plain(module, query, key, value, attention_mask, *args, **kwargs)
        table, parts = None, 1
        if group.table is None:
            states = cache.update(key_states=key, value_states=value, layer_idx=layer, kwargs=kwargs)
        else:
            if update is not None and group.window:
                update.undo = _undo(allocator, layer, kwargs)
            states = _written(allocator, key, value, layer, kwargs)
            table, parts = group.table_beside(states[0])
        if parts > 1:
            states = [pages.unflatten(1, (parts, -1)).flatten(0, 1) for pages in states]
        # A table is of a window's keys only, which its queries see all.
        window = group.window if table is None else 0
        found = paged.attend(query, states, group.batch, table, _scaling(query, kwargs), window, logits)
        paged_updates.drop()
        counter.count_served()
        return found, None

    vars(attention).update({TAKES_REFUSAL: True, PLAIN: plain})
    return attention


def _scaling(query: Tensor, kwargs: dict[str, Any]) -> float:
    scaling = kwargs.get("scaling")
    return query.shape[-1] ** -0.5 if scaling is None else scaling


def _recorded(
    batch: RaggedBatch, layer: int, key: Tensor, value: Tensor, mask: Any, reason: str
) -> tuple[list[Tensor], paged.Batch, Tensor]:
    """Pages with the new keys and values in them, requests and table, while a forward is recorded.

    Raises:
        ReadsArgument: The mask is not what the forward was called with, or there is another ``reason``.
    """
    group, own = batch.groups[layer], batch.own
    if reason or not any(mask is own[name] for name in batch.masks):
        raise ReadsArgument(reason or "makes a mask of its own")
    pages = [own[ragged.named(layer, name)] for name in ("keys", "values")]
    for memory, states in zip(pages, (key, value), strict=True):
        rows = states.squeeze(0).transpose(0, 1)
        memory.view(-1, *memory.shape[2:]).index_copy_(0, own[ragged.named(group, "write")], rows)
    sums_q, sums_k, table = (own[ragged.named(group, name)] for name in ("sums_q", "sums_k", "table"))
    return pages, paged.Batch(sums_q, sums_k), table


def _written(allocator: Any, key: Tensor, value: Tensor, layer: int, kwargs: dict[str, Any]) -> Any:
    """The pages of ``layer`` with the new keys and values in them."""
    write = kwargs["write_index"][allocator.index]
    rows = (states.squeeze(0).transpose(0, 1) for states in (key, value))
    # With nothing to read it only writes.
    allocator.update(*rows, layer, write[:0], write)
    return pages_of(allocator, layer)


def _undo(allocator: Any, layer: int, kwargs: dict[str, Any]) -> Callable[[], None]:
    """What gives the pages of ``layer`` back the keys and values that a batch is about to overwrite."""
    write = kwargs["write_index"][allocator.index]
    rows = [pages.flatten(0, 1) for pages in pages_of(allocator, layer)]
    former = [each[write] for each in rows]

    def undo() -> None:
        for each, before in zip(rows, former, strict=True):
            each.index_copy_(0, write, before)

    return undo


def pages_of(allocator: Any, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of ``layer``, ``[pages, page_rows, kv_heads, head_dim]``."""
    return _full_allocator().get_cache_for_block_table(allocator, layer)


def _describe(cache: Any, allocator: Any, kwargs: dict[str, Any]) -> Group:
    """What the batch reads and writes in the cache of ``allocator``, from the arguments of the model."""
    sums_q, sums_k = (
        sums.to("cpu", torch.int64)
        for sums in (kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"][allocator.layer_type])
    )
    batch = paged.Batch(sums_q, sums_k)
    write = kwargs["write_index"][allocator.index].cpu()
    group = functools.partial(Group, kind=allocator.layer_type, batch=batch, write=write)
    # In this order: digests are kept, and would be those of what was there for a while.
    reason = _replaced(cache, allocator) or _unknown(type(allocator))
    if reason:
        return group(reason)
    window = getattr(allocator, "sliding_window", 0)
    read, rows = kwargs["read_index"][allocator.index].cpu(), allocator.tokens_per_page
    if not read.numel():
        whole = torch.equal(sums_q, sums_k)
        return group("" if whole else "keys that are not in the cache", window=window)
    if not window:
        table = paged.table_in_order(batch, read, write, rows)
        return group("" if table is not None else "pages that are not in order", table=table)
    table = None
    if batch.is_decode:
        table = paged.table_of_ring(batch, read, write, rows, allocator.sentinel_index)
    if table is not None:
        return group("", table=table, window=window)
    # The cache itself puts the window before the new keys: they may take its place.
    return group("", window=window, unrecorded=RINGS if batch.is_decode else WINDOWS)


def _unserved(
    query: Tensor, key: Tensor, value: Tensor, logits: Tensor | None, kwargs: dict[str, Any]
) -> str:
    reason = unserved(query, key, value, logits) or autocast(query)
    if reason:
        return reason
    if kwargs.get("dropout"):
        return "dropout"
    if kwargs.get("output_attentions"):
        return "attention weights wanted"
    for name in _UNSERVED_ARGUMENTS:
        if kwargs.get(name) is not None:
            return f"argument {name}"
    if not _DESCRIBES <= kwargs.keys():
        return "no description of the batch"
    if query.ndim != 4 or query.shape[0] != 1 or key.shape[:3:2] != query.shape[:3:2]:
        return "queries that are not packed"
    if query.dtype != key.dtype or query.dtype != value.dtype:
        return "mixed dtypes"
    if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1] or query.shape[3] != key.shape[3]:
        return "heads that do not match"
    if logits is None:
        return ""
    if logits.shape != query.shape[1:2] or logits.dtype not in (query.dtype, torch.float32):
        return "sinks of another shape or dtype"
    return ""


def has_rules() -> bool:
    """Whether rules serve the paged cache of this transformers: no other attention reads it for a program."""
    return bool(_rules)


def _is_served(module: Any) -> bool:
    """Whether the entry of the registry that ``module`` is about to ask for is one of ours, and serves it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    entry = ALL_ATTENTION_FUNCTIONS.get(name)
    rules = () if hasattr(entry, "__wrapped__") else getattr(entry, "__liteboost_rules__", ())
    return bool(rules) and rules[-1] in _rules and _is_marked(module, rules[-1])


def _is_marked(module: Any, rule: str) -> bool:
    mark = getattr(module, "__liteboost__", None)
    return mark is not None and any(outcome.rule == rule for outcome in mark.outcomes)


@functools.cache
def _full_allocator() -> type:
    from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator

    return FullAttentionCacheAllocator


def _unknown(cls: type) -> str:
    """Why the pages of an allocator of this class may not be read: its methods are not those we have read."""
    for method in _METHODS:
        owner = _full_allocator() if method == "get_cache_for_block_table" else cls
        try:
            digest = fingerprint(getattr(owner, method), owner).digest
        except Opaque as fault:
            return f"{cls.__name__}.{method} {fault}"
        if digest not in _known:
            return f"{cls.__name__}.{method} is not known"
    return ""


def _replaced(cache: Any, allocator: Any) -> str:
    """Why the cache itself has to write and gather: somebody has replaced how it does, or what that calls."""
    if "update" in vars(cache) or not vars(allocator).keys().isdisjoint(_METHODS):
        return "the cache has a method of its own"
    holders = (type(cache), type(allocator))
    return _watch_of_updates(*((cls, cls.update) for cls in holders))()


@functools.cache
def _watch_of_updates(*methods: tuple[type, Callable[..., Any]]) -> Watch:
    """Over how caches of these classes are updated: the first's method, and what both call."""
    first = place_in_class(methods[0][0], "update")
    return watch_over([first, *(place for cls, call in methods for place in of_function(call, cls))])
