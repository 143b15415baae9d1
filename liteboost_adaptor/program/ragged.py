"""What stands for the cache in pages of one forward pass of many requests.

To a program it is a cache without layers: pages, block tables and where new keys are written are arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from .caches import INNER
from .stand_in import ReadsArgument

#: The argument that is one.
NAME = "ragged_batch"


def named(number: int, what: str) -> str:
    """The argument that is ``what`` of the layers of one kind, or of one layer.

    Of a kind: ``sums_q``, ``sums_k``, ``table``, ``write``; of a layer: ``keys``, ``values``, its pages.
    """
    return f"{NAME}.{number}.{what}"


class RaggedBatch:
    """One forward pass.

    Attributes:
        cache: What it stands for.
        layers: None that a program appends to.
        groups: Layer -> the number of what all layers of its kind read and write.
        masks: Names of the arguments that are masks.
        own: While it is recorded: what it reads and writes, and the masks, by names of arguments.
    """

    __slots__ = ("__dict__", "__weakref__", "cache", "groups", "masks", "own")
    layers: tuple[Any, ...] = ()

    def __init__(self, cache: Any, groups: Mapping[int, int], masks: Collection[str]) -> None:
        self.cache = cache
        self.groups, self.masks = dict(groups), list(masks)
        self.own: Mapping[str, torch.Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        """Nobody but our attention may read it while it stands for a cache, but for what the cache lacks."""
        if name in INNER or name.startswith("__") or not hasattr(self.cache, name):
            raise AttributeError(name)
        raise ReadsArgument(f"reads {name} of the paged cache")
