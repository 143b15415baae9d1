"""What keeps the tensors of a cache: the attributes of its layers, and the dicts among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..kv_cache import buffers
from .tensors import version, write_back


@dataclass(frozen=True)
class CacheDict:
    """One dict: the attributes of a layer, or one of them.

    Attributes:
        layer: Its index among the cache's parts.
        attribute: Empty for the layer's attributes themselves.
    """

    layer: int
    attribute: str = ""

    def of(self, layers: list[Any]) -> dict[Any, Any]:
        """The dict in a cache with ``layers``.

        Raises:
            KeyError: There is none.
        """
        own = vars(layers[self.layer])
        return own[self.attribute] if self.attribute else own


class CacheSnapshot:
    """What the dicts of a cache hold, to be given back where a step fails half way."""

    def __init__(self, owns: list[dict[Any, Any]]) -> None:
        self._owns = [(own, dict(own)) for own in owns]
        grown = [own[buffers.BUFFERS] for own in owns if buffers.BUFFERS in own]
        self._owns += [(own, dict(own)) for own in grown]
        self._ends = [
            (buffer, buffer.end)
            for own in grown
            for buffer in own.values()
            if isinstance(buffer, buffers.KVBuffer)
        ]
        names = [set(own.get(buffers.BUFFERS, ())) for own in owns]
        # What grows is not written over; the rest may be.
        self._values = [
            (value, value.clone(), version(value))
            for own, grows in zip(owns, names, strict=True)
            for name, value in own.items()
            if isinstance(value, torch.Tensor) and name not in grows
        ]

    def give_back(self) -> None:
        """Everything as it was."""
        for own, values in self._owns:
            own.clear()
            own.update(values)
        for buffer, end in self._ends:
            buffer.end = end
        for tensor, value, number in self._values:
            write_back(tensor, value, number)


def cache_dicts(layers: list[Any]) -> list[CacheDict]:
    """All of a cache, whose `caches.parts` are ``layers``."""
    found = []
    for at, layer in enumerate(layers):
        found.append(CacheDict(at))
        found += [
            CacheDict(at, name)
            for name, value in vars(layer).items()
            if type(value) is dict and name != buffers.BUFFERS
        ]
    return found
