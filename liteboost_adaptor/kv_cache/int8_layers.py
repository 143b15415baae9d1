"""A KV cache of integers: each key and value of a token and head as int8 with a scale of its own (kv8).

What a layer keeps as ``keys`` and ``values`` are rows of `torch.ops.liteboost.quantize_kv`, which hold their
scales; they grow in place as those of any layer (`kv_cache.buffers`). Whoever is handed what ``update``
returns gets an `Int8KVTensor`: our attention reads the rows as they are, anybody else the values dequantized.
Who reads the attribute gets these values as an ordinary tensor, which the layer keeps until more come: it may
be written to in any way. On an NPU the scales are a tensor of their own, which the layer keeps beside.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..eligibility import unserved
from ..report import REFUSED, Outcome, report
from . import buffers
from .int8_tensor import Int8KVTensor, dequantized_kv, lies_apart, rounded, values_of

#: The row of the status.
RULE = "cache.int8"
#: What a layer keeps as integers.
NAMES = ("keys", "values")
#: Behind a name of `NAMES`: under which attribute a layer keeps the dtype that its integers stand for.
_DTYPE = "_liteboost_dtype_of_"
#: The same: under which it keeps the scales that do not lie behind their integers.
_SCALES = "_liteboost_scales_of_"
#: What a layer has in its dict that keeps integers, or will.
INTEGERS = "_liteboost_integers"

counter = report.counter(RULE)
#: Modules whose caches are to keep integers.
_wanted_by: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


class Given(NamedTuple):
    """Stands among the buffers of a layer for what it keeps as values, because somebody was given them.

    Attributes:
        rows: What they were dequantized of.
        former: What stood there before.
    """

    rows: Int8KVTensor
    former: Any


def want(module: torch.nn.Module) -> None:
    """Let caches that ``module`` updates keep integers from now on."""
    _wanted_by.add(module)


def want_no_longer(module: torch.nn.Module) -> None:
    """Take `want` back; caches that keep integers go on."""
    _wanted_by.discard(module)


def is_wanted(module: Any) -> bool:
    """Whether caches that ``module`` updates are to keep integers."""
    return module is not None and module in _wanted_by


def note(cls: type, reason: str) -> None:
    """Have the status say that layers of class ``cls`` stay as they are."""
    report.add(Outcome(RULE, REFUSED, f"{cls.__module__}:{cls.__qualname__}", reason))


def append(plain_append: Callable[..., Any]) -> Callable[..., Any]:
    """What stands for a concatenation in a layer that keeps integers; ``plain_append`` for any other."""

    def call(held: torch.Tensor, layer: Any, name: str, new: torch.Tensor, dim: int) -> torch.Tensor:
        if name not in NAMES:
            return plain_append(held, layer, name, new, dim)
        reason = _unserved(held, new, dim)
        if reason:
            counter.count_fallback(reason)
            return plain_append(dequantized_kv(held), layer, name, new, dim)
        counter.count_served()
        is_apart = lies_apart(new)
        added = rounded(new, is_apart)
        kept: Int8KVTensor | None
        if type(held) is Int8KVTensor:
            kept = held.laid_out(is_apart)
        else:  # nothing, or what somebody else has put there
            kept = _rows_for(vars(layer), name, held, is_apart) if held.numel() else None
        vars(layer)[_DTYPE + name] = new.dtype
        recording = buffers.recorder()
        grow = buffers.grown if recording is None else recording.append

        def behind(before: torch.Tensor | None, under: str, after: torch.Tensor) -> torch.Tensor:
            before = after.new_empty(0) if before is None else before
            return grow(before, layer, under, after, dim % new.dim())

        rows = behind(None if kept is None else kept.rows, name, added.rows)
        if added.scales is None:
            return Int8KVTensor(rows, new.dtype)
        scales = behind(None if kept is None else kept.scales, _SCALES + name, added.scales)
        return Int8KVTensor(rows, new.dtype, scales)

    return call


def _unserved(held: torch.Tensor, new: torch.Tensor, dim: int) -> str:
    if torch.compiler.is_compiling():
        return "torch.compile"
    reason = unserved(new, held.rows if type(held) is Int8KVTensor else held, casts=True)
    if reason:
        return reason
    if new.dim() != 4 or dim % new.dim() != 2:
        return "no heads with rows of tokens"
    if not (held.dim() == 1 and held.numel() == 0):  # what transformers begins with
        if held.dtype != new.dtype:
            return "another dtype than what is kept"
        if held.dim() != 4 or held.shape[:2] != new.shape[:2] or held.shape[3] != new.shape[3]:
            return "another shape than what is kept"
    return ""


def kept(own: dict[str, Any], name: str) -> Any:
    """What a layer with ``own`` as its dict keeps under ``name``: rows of integers, or what else is there."""
    value, dtype = own[name], own.get(_DTYPE + name)
    if dtype is None or not isinstance(value, torch.Tensor) or value.dtype != torch.int8:
        return value
    scales = own.get(_SCALES + name)
    if torch.compiler.is_compiling():
        return values_of(value, scales, dtype)
    return Int8KVTensor(value, dtype, scales)


def put(own: dict[str, Any], name: str, value: Any) -> None:
    """Let ``own`` keep ``value`` under ``name``."""
    scales = None
    if type(value) is Int8KVTensor and own.get(INTEGERS):
        own[_DTYPE + name] = value.dtype
        value, scales = value.rows, value.scales
    own[name] = value
    if scales is not None:
        own[_SCALES + name] = scales
    else:
        own.pop(_SCALES + name, None)


def hand_out(own: dict[str, Any], name: str, rows: Int8KVTensor) -> torch.Tensor:
    """The values of ``rows``, which ``own`` keeps under ``name`` from now on.

    The rows lie beside until more come: where the values are still theirs, they are not rounded again.
    """
    mine = own.setdefault(buffers.BUFFERS, {})
    buffer = mine.get(name)
    in_inference_mode = isinstance(buffer, buffers.KVBuffer) and buffer.in_inference_mode
    with torch.inference_mode(in_inference_mode), torch.no_grad():
        own[name] = rows.dequantized_kv()
    own.pop(_SCALES + name, None)
    mine[name] = Given(rows, mine.get(name))
    return own[name]


def _rows_for(own: dict[str, Any], name: str, held: torch.Tensor, is_apart: bool) -> Int8KVTensor:
    """``held``, the values under ``name``, as rows: where they were handed out and not written to, those."""
    mine = own.get(buffers.BUFFERS, {})
    given = mine.get(name)
    if type(given) is not Given:
        return rounded(held, is_apart)
    del mine[name]
    if given.former is not None:
        mine[name] = given.former
    if given.rows.shape != held.shape or given.rows.dtype != held.dtype:
        return rounded(held, is_apart)
    before = given.rows.laid_out(is_apart)
    same = (before.dequantized_kv() == held).all(dim=-1, keepdim=True)
    if bool(same.all()):
        return before
    after = rounded(held, is_apart)
    rows = torch.where(same, before.rows, after.rows)
    if before.scales is None or after.scales is None:
        return Int8KVTensor(rows, held.dtype)
    return Int8KVTensor(rows, held.dtype, torch.where(same, before.scales, after.scales))


def scales_of(name: str) -> str:
    """Under which attribute a layer keeps the scales of ``name`` that do not lie behind their integers."""
    return _SCALES + name


def adopt(own: dict[str, Any]) -> None:
    """Let a layer that has ``own`` in its dict keep integers from now on."""
    own[INTEGERS] = True
    for name in NAMES:
        if type(found := own.get(name)) is Int8KVTensor:  # of a copy
            put(own, name, found)


def release(own: dict[str, Any]) -> None:
    """Let a layer keep values again, if it kept integers."""
    for name in NAMES:
        if name in own:
            own[name] = dequantized_kv(kept(own, name))
        for beside in (_DTYPE, _SCALES):
            own.pop(beside + name, None)
    own.pop(INTEGERS, None)
