"""Where we meet transformers' caches: the layers of one that a bound module updates append in place.

The methods that append are set on the class that defines them, for layers keep their class: code that asks
for ``type(layer)`` finds what it knows. They act for the layers served alone; all others run the original.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..engine.appends import reroute_appends
from ..engine.source import SourceUnavailable
from ..report import FAILED, REFUSED, CallCounter, Outcome, report
from . import buffers, int8_layers
from . import layers as cache_layers

_RULE = "cache.append"
_MISSING = object()
#: Classes that were asked about, and whether their layers append in a way we know.
_known: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()
#: (class, attribute, ours, what it had) of what we have set.
_set: list[tuple[type, str, Any, Any]] = []
#: What each of ours was put in the place of, while anybody holds it: whoever patched a class after us may put
#: ours back there when we have long taken it away.
_formers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_lock = threading.RLock()
#: (whether a cache is one of them, what stands for it) of caches that are not transformers' `Cache`.
_others: list[tuple[Callable[[Any], bool], Callable[[Any, Any, bool], Any]]] = []


def serve_others(are: Callable[[Any], bool], receiver: Callable[[Any, Any, bool], Any]) -> None:
    """Let ``receiver`` say what stands for a cache of another kind in ``cache.update(...)`` of a module.

    It is called with the cache, the module, and whether the results go to attention alone.
    """
    _others[:] = [(are, receiver)]


def appending(_: Any, counter: CallCounter) -> Callable[..., Any]:
    """What stands for ``cache`` in ``cache.update(...)``: the same object, whose layers append in place."""
    return _receiver(counter)


@functools.lru_cache(maxsize=4)
def _receiver(counter: CallCounter) -> Callable[..., Any]:
    append = buffers.append(counter)
    append_integers = int8_layers.append(append)

    def serve(layer: Any, wants_integers: bool) -> None:
        cls = type(layer)
        reason = _unsuited(cls) if wants_integers else ""
        if _is_prepared(cls):
            has_integers = wants_integers and not reason
            cache_layers.serve(layer, append_integers if has_integers else append, has_integers)
        elif wants_integers and not reason:
            reason = "it does not append to what it keeps"
        if reason and hasattr(cls, "update"):
            int8_layers.note(cls, reason)

    def receiver(cache: Any, module: Any = None, is_handed_on: bool = False) -> Any:
        if torch.compiler.is_compiling():
            return cache
        if not isinstance(cache, _cache_class()):
            return next((other(cache, module, is_handed_on) for are, other in _others if are(cache)), cache)
        layers = _layers_for(module, getattr(cache, "self_attention_cache", cache))
        has_integers = int8_layers.is_wanted(module)
        if layers and not all(_is_served(layer, has_integers) for layer in (layers[0], layers[-1])):
            for layer in layers:
                if not _is_served(layer, has_integers):
                    serve(layer, has_integers)
        return cache

    return receiver


def _layers_for(module: Any, cache: Any) -> Any:
    """The layers of ``cache``, also those that an update by ``module`` is going to make."""
    layers: Any = getattr(cache, "layers", ())
    make, index = getattr(cache, "layer_class_to_replicate", None), getattr(module, "layer_idx", None)
    if make is not None and isinstance(index, int):
        # As Cache.update does: one made there would not be met before it is filled.
        while len(layers) <= index:
            layers.append(make())
    return layers


def restore_all() -> list[str]:
    """Give every layer back what it would keep without us, and every class its own methods.

    Returns:
        A sentence where someone else has changed a class since.
    """
    with _lock, cache_layers.paused():
        cache_layers.release_all()
        left = []
        for owner, name, ours, former in reversed(_set):
            if vars(owner).get(name, _MISSING) is not ours:
                left.append(f"{owner.__qualname__}.{name} was patched by someone else since; theirs is left")
            elif former is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, former)
        _set.clear()
        _known.clear()
        return left


def _is_served(layer: Any, wants_integers: bool) -> bool:
    entry = cache_layers.served(layer)
    # One that keeps integers goes on doing so, whoever updates it.
    return entry is not None and (entry.has_integers or not wants_integers or bool(_unsuited(type(layer))))


def _unsuited(cls: type) -> str:
    """Why layers of class ``cls`` are not made to keep integers, or an empty string."""
    return "it quantizes what it keeps itself" if issubclass(cls, _quantizing_classes()) else ""


@functools.cache
def _quantizing_classes() -> tuple[type, ...]:
    from transformers import cache_utils

    names = ("BaseQuantizedLayer", "QuantizedLayer")
    return tuple(getattr(cache_utils, name) for name in names if hasattr(cache_utils, name))


@functools.cache
def _cache_class() -> type:
    from transformers.cache_utils import Cache

    return Cache


def _is_prepared(cls: type) -> bool:
    """Whether layers of class ``cls`` append in a way we know; then the class has our methods."""
    with _lock:
        if cls not in _known:
            _known[cls] = _prepare(cls)
        return _known[cls]


def _prepare(cls: type) -> bool:
    if not hasattr(cls, "update"):  # a state is exchanged, not updated
        return False
    target = f"{cls.__module__}:{cls.__qualname__}"
    try:
        found = _appending(cls)
        names = {name for _, _, (_, appended) in found for name in appended}
        if taken := [name for name in names if not _is_free(cls, name)]:
            raise SourceUnavailable(f"the class has an attribute {taken[0]} of its own")
    except SourceUnavailable as fault:
        report.add(Outcome(_RULE, REFUSED, target, str(fault)))
        return False
    except Exception as fault:  # noqa: BLE001 - recorded; the layer stays as it is
        report.add(Outcome(_RULE, FAILED, target, f"{type(fault).__name__}: {fault}"))
        return False
    for owner, method, (function, appended) in found:
        if _is_set(owner, method):
            continue  # of a class derived from it, before
        _put(owner, method, cache_layers.routed(_theirs(owner, method), function))
        for name in appended:
            if not _is_set(owner, name):
                _put(owner, name, cache_layers.attribute(name))
        if not _is_set(owner, "__getstate__"):
            own = _theirs(owner, "__getstate__")
            inherited = super(owner, owner).__getstate__  # type: ignore[arg-type] # a class it cannot name
            _put(owner, "__getstate__", cache_layers.state(inherited if own is _MISSING else own))
    cache_layers.read_by_methods(cls)
    return bool(found)


def _appending(cls: type) -> list[tuple[type, str, Any]]:
    """(class that defines it, name, what `reroute_appends` gives) of each method of ``cls`` that appends."""
    found = []
    for name in dir(cls):
        if not name.startswith("update"):
            continue
        owner = next(base for base in cls.__mro__ if name in vars(base))
        method = _theirs(owner, name)
        if not inspect.isfunction(method):
            continue
        made = _rerouted(method)
        if made is not None:
            found.append((owner, name, made))
    return found


@functools.lru_cache(maxsize=64)
def _rerouted(method: Callable[..., Any]) -> Any:
    return reroute_appends(method, cache_layers.append)


def _is_free(cls: type, name: str) -> bool:
    """Whether ``name`` is an attribute of instances of ``cls``, and the class has none but ours."""
    found = inspect.getattr_static(cls, name, None)
    return found is None or type(found) is cache_layers.Attribute


def _is_set(owner: type, name: str) -> bool:
    """Whether ``owner`` has, under ``name``, what was set since the last `restore_all`."""
    found = vars(owner).get(name, _MISSING)
    return any(cls is owner and ours is found for cls, _, ours, _ in _set)


def _theirs(owner: type, name: str) -> Any:
    """What ``owner`` itself has under ``name`` without us."""
    value = vars(owner).get(name, _MISSING)
    # Types are compared because values of others may have no hash.
    while type(value) in (types.FunctionType, cache_layers.Attribute) and value in _formers:
        value = _formers[value]
    return value


def _put(owner: type, name: str, value: Any) -> None:
    former = _formers[value] = _theirs(owner, name)
    _set.append((owner, name, value, former))
    setattr(owner, name, value)
