"""Where we meet transformers' caches: the layers of one that a bound module updates append in place."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..engine import swap
from ..engine.appends import reroute_appends
from ..engine.source import SourceUnavailable
from ..replacements import cache as rooms
from ..replacements import int8_cache
from ..report import FAILED, REFUSED, Outcome, Tally, report

_RULE = "cache.append"
#: By identity: a layer's class may say that layers are equal, or have no hash.
_served: dict[int, weakref.ref[Any]] = {}


def appending(_: Any, tally: Tally) -> Callable[..., Any]:
    """What stands for ``cache`` in ``cache.update(...)``: the same object, whose layers append in place."""
    return _receiver(tally)


@functools.lru_cache(maxsize=4)
def _receiver(tally: Tally) -> Callable[..., Any]:
    append = rooms.append(tally)

    @functools.lru_cache(maxsize=256)
    def serving(cls: type, has_integers: bool) -> type | None:
        if not has_integers:
            return _serving(cls, append, rooms.methods)
        made = None
        if not (reason := _unsuited(cls)):
            made = _serving(cls, int8_cache.append(append), int8_cache.methods)
            reason = "it does not append to what it keeps"
        if made is None and hasattr(cls, "update"):
            int8_cache.note(cls, reason)
        return made or serving(cls, False)

    def receiver(cache: Any, module: Any = None) -> Any:
        if torch.compiler.is_compiling() or not isinstance(cache, _cache_class()):
            return cache
        layers = _layers_for(module, getattr(cache, "self_attention_cache", cache))
        has_integers = int8_cache.is_wanted(module)
        if layers and not all(_is_served(layer, has_integers) for layer in (layers[0], layers[-1])):
            for layer in layers:
                if _is_served(layer, has_integers):
                    continue
                made = serving(swap.original_class(layer), has_integers)
                if made is not None:
                    _served[id(layer)] = weakref.ref(layer, functools.partial(_forget, id(layer)))
                    layer.__class__ = made
                    int8_cache.adopt(layer)
        return cache

    return receiver


def _layers_for(module: Any, cache: Any) -> Any:
    """The layers of ``cache``, also those that an update by ``module`` is going to make."""
    layers = getattr(cache, "layers", ())
    make, index = getattr(cache, "layer_class_to_replicate", None), getattr(module, "layer_idx", None)
    if make is not None and isinstance(index, int):
        while (
            len(layers) <= index
        ):  # as Cache.update does: one made there would not be met before it is filled
            layers.append(make())
    return layers


def restore_all() -> list[str]:
    """Give every layer its own class back; what it keeps stays as it is.

    Returns:
        A sentence where someone else has changed a layer's class since.
    """
    left = []
    for reference in list(_served.values()):
        layer = reference()
        if layer is None:
            continue
        vars(layer).pop(rooms.ROOMS, None)
        int8_cache.release(layer)
        if not swap.restore(layer):
            left.append(
                f"the class of a {type(layer).__name__} was changed by someone else since; theirs is left"
            )
    _served.clear()
    return list(dict.fromkeys(left))


def _forget(key: int, _: weakref.ref[Any]) -> None:
    _served.pop(key, None)


def _is_served(layer: Any, has_integers: bool) -> bool:
    # One that keeps integers goes on doing so, whoever updates it.
    served = swap.MARKER in type(layer).__dict__
    return served and (not has_integers or int8_cache.is_one(layer) or bool(_unsuited(type(layer))))


def _unsuited(cls: type) -> str:
    """Why layers of class ``cls`` are not made to keep integers, or an empty string."""
    return "it quantises what it keeps itself" if issubclass(cls, _quantizing_classes()) else ""


@functools.cache
def _quantizing_classes() -> tuple[type, ...]:
    from transformers import cache_utils

    names = ("BaseQuantizedLayer", "QuantizedLayer")
    return tuple(getattr(cache_utils, name) for name in names if hasattr(cache_utils, name))


@functools.cache
def _cache_class() -> type:
    from transformers.cache_utils import Cache

    return Cache


def _serving(cls: type, append: Callable[..., Any], methods: Callable[..., Any]) -> type | None:
    """A class for layers of class ``cls``, or ``None`` where they append in no way we know.

    Args:
        append: What stands for a concatenation.
        methods: Gives the methods of the class, of ``cls`` and those that append.
    """
    if swap.MARKER in vars(cls) or not hasattr(cls, "update"):  # a state is exchanged, not updated
        return None
    target = f"{cls.__module__}:{cls.__qualname__}"
    names = [
        name for name in dir(cls) if name.startswith("update") and inspect.isfunction(getattr(cls, name))
    ]
    try:
        found = {name: reroute_appends(getattr(cls, name), append, cls, name) for name in names}
        appending = {name: method for name, method in found.items() if method is not None}
        return swap.subclass(cls, methods(cls, appending), _RULE) if appending else None
    except SourceUnavailable as fault:
        report.add(Outcome(_RULE, REFUSED, target, str(fault)))
    except Exception as fault:  # noqa: BLE001 - recorded; the layer stays as it is
        report.add(Outcome(_RULE, FAILED, target, f"{type(fault).__name__}: {fault}"))
    return None
