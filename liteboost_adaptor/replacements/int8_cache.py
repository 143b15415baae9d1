"""A KV cache of integers: each key and value of a token and head as int8 with a scale of its own (kv8).

What a layer keeps as ``keys`` and ``values`` are rows of `torch.ops.liteboost.int8_rows`, which hold their
scales; they grow in place as those of any layer (`replacements.cache`). Whoever reads the attribute, or is
handed what ``update`` returns, gets an `Int8Rows`: our attention reads the rows as they are, anybody else the
values multiplied out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..ops.int8_attention import dequantized
from ..report import REFUSED, Outcome, report
from . import cache
from .guards import unserved
from .int8_rows import Int8Rows, multiplied_out

ops = torch.ops.liteboost
#: The row of the status.
RULE = "cache.int8"
#: What a layer keeps as integers.
NAMES = ("keys", "values")
#: Behind a name of `NAMES`: under which attribute a layer keeps the dtype that its integers stand for.
_DTYPE = "_liteboost_dtype_of_"

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
        rows = ops.int8_rows(new)
        if type(held) is Int8Rows:
            kept = held.rows
        else:  # nothing, or what somebody else has put there
            kept = ops.int8_rows(held) if held.numel() else rows.new_empty(0)
        vars(layer)[_DTYPE + name] = new.dtype
        recording = cache.recorder()
        grow = cache.grown if recording is None else recording.append
        return Int8Rows(grow(kept, layer, name, rows, dim % new.dim()), new.dtype)

    return call


def _unserved(held: torch.Tensor, new: torch.Tensor, dim: int) -> str:
    if torch.compiler.is_compiling():
        return "torch.compile"
    reason = unserved(new, held.rows if type(held) is Int8Rows else held)
    if reason:
        return reason
    if not new.is_cpu:
        return f"device {new.device.type}, where nothing reads integers"
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
        own = {name: _read(state[name], state.get(_DTYPE + name)) for name in NAMES if name in state}
        return {**state, **own}

    return {**made, "__getstate__": __getstate__, **{name: _attribute(name) for name in NAMES}}


def _attribute(name: str) -> property:
    def get(self: Any) -> Any:
        try:
            value = self.__dict__[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") from None
        return _read(value, self.__dict__.get(_DTYPE + name))

    def put(self: Any, value: Any) -> None:
        if type(value) is Int8Rows:
            self.__dict__[_DTYPE + name] = value.dtype
            value = value.rows
        self.__dict__[name] = value

    return property(get, put)


def _read(value: Any, dtype: torch.dtype | None) -> Any:
    """What a layer that has ``value`` in its dict says that it keeps."""
    if dtype is None or not isinstance(value, torch.Tensor) or value.dtype != torch.int8:
        return value
    return dequantized(value, dtype) if torch.compiler.is_compiling() else Int8Rows(value, dtype)


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
        dtype = own.pop(_DTYPE + name, None)
        if name in own:
            own[name] = multiplied_out(_read(own[name], dtype))
