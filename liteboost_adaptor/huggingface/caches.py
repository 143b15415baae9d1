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
from ..report import FAILED, REFUSED, Outcome, Tally, report

_RULE = "cache.append"
#: By identity: a layer's class may say that layers are equal, or have no hash.
_served: dict[int, weakref.ref[Any]] = {}


def appending(_: Any, tally: Tally) -> Callable[[Any], Any]:
    """What stands for ``cache`` in ``cache.update(...)``: the same object, whose layers append in place."""
    return _receiver(tally)


@functools.lru_cache(maxsize=4)
def _receiver(tally: Tally) -> Callable[[Any], Any]:
    append = rooms.append(tally)

    @functools.lru_cache(maxsize=256)
    def serving(cls: type) -> type | None:
        return _serving(cls, append)

    def receiver(cache: Any) -> Any:
        if torch.compiler.is_compiling() or not isinstance(cache, _cache_class()):
            return cache
        layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
        if layers and not (_is_served(layers[0]) and _is_served(layers[-1])):
            for layer in layers:
                made = serving(type(layer))
                if made is not None:
                    _served[id(layer)] = weakref.ref(layer, functools.partial(_forget, id(layer)))
                    layer.__class__ = made
        return cache

    return receiver


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
        if not swap.restore(layer):
            left.append(
                f"the class of a {type(layer).__name__} was changed by someone else since; theirs is left"
            )
    _served.clear()
    return list(dict.fromkeys(left))


def _forget(key: int, _: weakref.ref[Any]) -> None:
    _served.pop(key, None)


def _is_served(layer: Any) -> bool:
    return swap.MARKER in type(layer).__dict__


@functools.cache
def _cache_class() -> type:
    from transformers.cache_utils import Cache

    return Cache


def _serving(cls: type, append: Callable[..., Any]) -> type | None:
    """A class for layers of class ``cls``, or ``None`` where they append in no way we know."""
    if swap.MARKER in vars(cls) or not hasattr(cls, "update"):  # a state is exchanged, not updated
        return None
    target = f"{cls.__module__}:{cls.__qualname__}"
    names = [
        name for name in dir(cls) if name.startswith("update") and inspect.isfunction(getattr(cls, name))
    ]
    try:
        found = {name: reroute_appends(getattr(cls, name), append, cls, name) for name in names}
        appending = {name: method for name, method in found.items() if method is not None}
        return swap.subclass(cls, rooms.methods(cls, appending), _RULE) if appending else None
    except SourceUnavailable as fault:
        report.add(Outcome(_RULE, REFUSED, target, str(fault)))
    except Exception as fault:  # noqa: BLE001 - recorded; the layer stays as it is
        report.add(Outcome(_RULE, FAILED, target, f"{type(fault).__name__}: {fault}"))
    return None
