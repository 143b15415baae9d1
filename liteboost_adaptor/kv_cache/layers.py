"""Which cache layers append in place, and what reading and writing their attributes means.

The code of transformers reads what a layer keeps as it lies in its memory. Anybody else gets a contiguous
tensor with a storage of its own, as concatenation would have made it, and the layer keeps that very tensor
from then on: it may be kept, saved, viewed and written to, and the next token begins new memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import buffers, int8_layers
from .int8_tensor import Int8KVTensor, dequantized_kv

#: What an instance keeps for us begins so, and is left out of copies and pickles.
_PRIVATE = "_liteboost_"
#: What functions of ours have.
MARKER = "__liteboost__"
#: Modules of transformers that read what a cache keeps for every token.
_MODELS = "transformers.models."


class Served:
    """How one layer is served.

    No named tuple: what makes one is code that a step which is recorded may not run.

    Attributes:
        layer: A weak reference to it.
        append: What stands for a concatenation.
        has_integers: Whether it keeps keys and values as integers.
    """

    __slots__ = ("append", "has_integers", "layer")

    def __init__(
        self, layer: weakref.ref[Any], append: Callable[..., torch.Tensor], has_integers: bool
    ) -> None:
        self.layer, self.append, self.has_integers = layer, append, has_integers


#: By identity: a layer's class may say that layers are equal, or have no hash.
_served: dict[int, Served] = {}
#: Functions that may be given what a layer keeps as it lies in its memory; by identity: hashing takes long.
_reading: dict[int, types.CodeType] = {}

#: How long, in seconds, `paused` waits for other threads. It ends only where one of them waits for this one:
#: code of the user's that takes the package off in the middle of an append.
MOST_WAIT = 1.0
#: Of each thread that has ever appended: held while it does.
_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_own = threading.local()


def using() -> Any:
    """What a thread holds while it reads and writes what layers keep: nobody releases them meanwhile."""
    try:
        return _own.lock
    except AttributeError:
        _own.lock = threading.RLock()
        _locks.add(_own.lock)
        return _own.lock


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No other thread is amid an append."""
    until = time.monotonic() + MOST_WAIT
    with contextlib.ExitStack() as held:
        for lock in list(_locks):
            if lock.acquire(timeout=max(0.0, until - time.monotonic())):
                held.callback(lock.release)
        yield


def _after_fork() -> None:
    """The other threads are gone, with what they held."""
    _locks.clear()
    vars(_own).clear()


os.register_at_fork(after_in_child=_after_fork)


def serve(layer: Any, append: Callable[..., torch.Tensor], has_integers: bool) -> None:
    """Let ``layer``, whose class has our methods, append by ``append`` from now on."""
    forget = functools.partial(_forget, id(layer))
    _served[id(layer)] = Served(weakref.ref(layer, forget), append, has_integers)
    if has_integers:
        int8_layers.adopt(vars(layer))


def served(layer: Any) -> Served | None:
    """How ``layer`` is served, if it is."""
    return _served.get(id(layer))


def release_all() -> None:
    """Let all layers keep, as ordinary tensors, what they would keep without us."""
    for entry in list(_served.values()):
        layer = entry.layer()
        if layer is not None:
            own = vars(layer)
            for name in list(own.get(buffers.BUFFERS, ())):
                if name in own:  # scales are gone once their integers have been handed out
                    _hand_out(own, name)
            own.pop(buffers.BUFFERS, None)
            int8_layers.release(own)
    _served.clear()


def _forget(key: int, _: weakref.ref[Any]) -> None:
    _served.pop(key, None)


def append(held: torch.Tensor, layer: Any, name: str, new: torch.Tensor, dim: int) -> torch.Tensor:
    """``torch.cat([held, new], dim)`` for the ``held`` of ``layer.name``."""
    entry = _served.get(id(layer))
    if entry is None:  # `paused` gave up waiting for this thread
        return torch.cat([dequantized_kv(held), new], dim=dim)
    return entry.append(held, layer, name, new, dim)


def routed(original: Callable[..., Any], appending: Callable[..., Any]) -> Callable[..., Any]:
    """``original`` for all layers of a class but those served, for which ``appending`` stands."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or id(self) not in _served:
            return original(self, *args, **kwargs)
        with using():
            return (appending if id(self) in _served else original)(self, *args, **kwargs)

    _read_by(appending)
    setattr(call, MARKER, True)
    return call


def read_by_methods(cls: type) -> None:
    """Let transformers' own methods of ``cls`` read what a layer keeps as it lies in its memory."""
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] == "transformers":
            for value in vars(base).values():
                if isinstance(value, types.FunctionType):
                    _read_by(value)


def _read_by(function: Any) -> None:
    while function is not None:
        if isinstance(function, types.FunctionType):
            _reading[id(function.__code__)] = function.__code__
        function = getattr(function, "__wrapped__", None)


class Attribute(property):
    """What `attribute` makes, told from properties of others."""


def attribute(name: str) -> Attribute:
    """The attribute ``name`` of a class of layers that append to it."""

    def get(self: Any) -> Any:
        own = self.__dict__
        if name not in own:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if torch.compiler.is_compiling():
            return int8_layers.kept(own, name)
        value = own[name]
        if buffers.BUFFERS not in own and int8_layers.INTEGERS not in own and type(value) is not Int8KVTensor:
            return value
        frame = sys._getframe(1)
        if id(frame.f_code) in _reading or str(frame.f_globals.get("__name__")).startswith(_MODELS):
            return int8_layers.kept(own, name)
        if (recording := buffers.recorder()) is not None:
            recording.recording.fault = f"{frame.f_code.co_qualname} reads {name} of a cache's layer"
            return int8_layers.kept(own, name)
        return _hand_out(own, name)

    def put(self: Any, value: Any) -> None:
        own = self.__dict__
        int8_layers.put(own, name, value)
        if buffers.BUFFERS in own and not torch.compiler.is_compiling() and not buffers.is_recorded():
            _let_go(own, name)
            _cut_loose(own, name)

    def delete(self: Any) -> None:
        own = self.__dict__
        if name not in own:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        put(self, None)
        del own[name]

    return Attribute(get, put, delete)


def _hand_out(own: dict[str, Any], name: str) -> Any:
    """What ``own`` keeps under ``name``, as somebody may have it, who keeps the same from now on."""
    value = int8_layers.kept(own, name)
    if type(value) is Int8KVTensor:
        return int8_layers.hand_out(own, name, value)
    buffer = own.get(buffers.BUFFERS, {}).get(name)
    if isinstance(buffer, buffers.KVBuffer) and buffer.shows(value):
        own[name] = buffer.copy(value)
        _let_go(own, name)
    return own[name]


def _let_go(own: dict[str, Any], name: str) -> None:
    """Forget the memory of ``name`` where ``own`` keeps something else by now: so must we, at once."""
    mine = own[buffers.BUFFERS]
    for each in (name, int8_layers.scales_of(name)):
        buffer, kept = mine.get(each), own.get(each)
        if buffer is None:
            continue
        if isinstance(buffer, int8_layers.Given) or not isinstance(kept, torch.Tensor):
            is_kept = False
        elif isinstance(buffer, buffers.KVBuffer):
            is_kept = buffer.shows(kept)
        else:
            is_kept = kept.untyped_storage()._cdata == buffer.storage
        if not is_kept:
            del mine[each]
    if not mine:
        del own[buffers.BUFFERS]


def _cut_loose(own: dict[str, Any], name: str) -> None:
    """Let a part of what was kept hold no more than its memory: a view holds on to what it was cut from."""
    kept = own[name]
    if isinstance(own.get(buffers.BUFFERS, {}).get(name), buffers.KVBuffer) and kept._base is not None:
        own[name] = kept.data


def state(original: Callable[..., Any]) -> Callable[..., Any]:
    """A ``__getstate__`` for a class of layers: nothing of ours is copied or saved."""

    @functools.wraps(original)
    def __getstate__(self: Any) -> Any:
        own = vars(self)
        if not any(str(name).startswith(_PRIVATE) for name in own):
            return original(self)
        for name in [name for name in own.get(buffers.BUFFERS, ()) if name in own]:
            if not str(name).startswith(_PRIVATE) and type(int8_layers.kept(own, name)) is not Int8KVTensor:
                _hand_out(own, name)
        found = original(self)
        if not isinstance(found, dict):
            return found
        # Rows of integers are copied as such, without the space behind them.
        integers = {
            name: value.each(_compact)
            for name in int8_layers.NAMES
            if name in found and type(value := int8_layers.kept(own, name)) is Int8KVTensor
        }
        kept = {name: value for name, value in found.items() if not str(name).startswith(_PRIVATE)}
        return {**kept, **integers}

    return __getstate__


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    is_whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if is_whole else tensor.clone(memory_format=torch.contiguous_format)
