"""A KV cache of integers: each key and value of a token and head as int8 with a scale of its own (kv8).

What a layer keeps as ``keys`` and ``values`` are rows of `torch.ops.liteboost.int8_rows`, which hold their
scales; they grow in place as those of any layer (`replacements.cache`). Whoever reads the attribute, or is
handed what ``update`` returns, gets an `Int8Rows`: our attention reads the rows as they are, anybody else the
values multiplied out. On an NPU the scales are a tensor of their own, which the layer keeps beside.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..report import REFUSED, Outcome, report
from . import cache
from .guards import unserved
from .int8_rows import Int8Rows, lies_apart, multiplied_out, rounded, values_of

#: The row of the status.
RULE = "cache.int8"
#: What a layer keeps as integers.
NAMES = ("keys", "values")
#: Behind a name of `NAMES`: under which attribute a layer keeps the dtype that its integers stand for.
_DTYPE = "_liteboost_dtype_of_"
#: The same: under which it keeps the scales that do not lie behind their integers.
_SCALES = "_liteboost_scales_of_"

tally = report.tally(RULE)
#: Modules whose caches are to keep integers.
_wanted_by: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


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
            tally.fell_back(reason)
            return plain_append(multiplied_out(held), layer, name, new, dim)
        tally.served()
        is_apart = lies_apart(new)
        added = rounded(new, is_apart)
        if type(held) is Int8Rows:
            kept = held.laid_out(is_apart)
        else:  # nothing, or what somebody else has put there
            kept = rounded(held, is_apart) if held.numel() else None
        vars(layer)[_DTYPE + name] = new.dtype
        recording = cache.recorder()
        grow = cache.grown if recording is None else recording.append

        def behind(before: torch.Tensor | None, under: str, after: torch.Tensor) -> torch.Tensor:
            before = after.new_empty(0) if before is None else before
            return grow(before, layer, under, after, dim % new.dim())

        rows = behind(None if kept is None else kept.rows, name, added.rows)
        if not is_apart:
            return Int8Rows(rows, new.dtype)
        scales = behind(None if kept is None else kept.scales, _SCALES + name, added.scales)
        return Int8Rows(rows, new.dtype, scales)

    return call


def _unserved(held: torch.Tensor, new: torch.Tensor, dim: int) -> str:
    if torch.compiler.is_compiling():
        return "torch.compile"
    reason = unserved(new, held.rows if type(held) is Int8Rows else held)
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


def methods(original: type, appending: dict[str, Callable[..., Any]]) -> dict[str, Any]:
    """What the class of a layer that keeps integers gets, beside what every layer's class does."""
    made = cache.methods(original, appending)
    state_of = made["__getstate__"]

    def __getstate__(self: Any) -> Any:
        # For copies and pickles, which are of the class that the layer had.
        state = state_of(self)
        if not isinstance(state, dict):
            return state
        own = {name: _kept(state, name) for name in NAMES if name in state}
        others = {name: value for name, value in state.items() if not str(name).startswith(_SCALES)}
        return {**others, **own}

    return {**made, "__getstate__": __getstate__, **{name: _attribute(name) for name in NAMES}}


def _attribute(name: str) -> property:
    def get(self: Any) -> Any:
        if name not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return _kept(self.__dict__, name)

    def put(self: Any, value: Any) -> None:
        own = self.__dict__
        scales = None
        if type(value) is Int8Rows:
            own[_DTYPE + name] = value.dtype
            value, scales = value.rows, value.scales
        own[name] = value
        if scales is not None:
            own[_SCALES + name] = scales
        else:
            own.pop(_SCALES + name, None)

    return property(get, put)


def _kept(own: dict[str, Any], name: str) -> Any:
    """What a layer that has ``own`` in its dict says that it keeps under ``name``."""
    value, dtype = own[name], own.get(_DTYPE + name)
    if dtype is None or not isinstance(value, torch.Tensor) or value.dtype != torch.int8:
        return value
    scales = own.get(_SCALES + name)
    if torch.compiler.is_compiling():
        return values_of(value, scales, dtype)
    return Int8Rows(value, dtype, scales)


def is_one(layer: Any) -> bool:
    """Whether ``layer`` keeps integers, or will."""
    return isinstance(vars(type(layer)).get(NAMES[0]), property)


def adopt(layer: Any) -> None:
    """Give a layer whose class has just become one for integers what it kept before."""
    if is_one(layer):
        for name in NAMES:
            if type(found := vars(layer).get(name)) is Int8Rows:  # of a copy
                setattr(layer, name, found)


def release(layer: Any) -> None:
    """Let ``layer`` keep values again, if it kept integers."""
    own = vars(layer)
    for name in NAMES:
        if name in own:
            own[name] = multiplied_out(_kept(own, name))
        for beside in (_DTYPE, _SCALES):
            own.pop(beside + name, None)
