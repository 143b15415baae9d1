"""What a forward returns, as an outline that tensors are put into."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .lower import CannotLower


@dataclass(frozen=True)
class _Leaf:
    """The next tensor, or the cache that was handed in."""

    is_cache: bool = False


@dataclass(frozen=True)
class _Named:
    """One of transformers' outputs."""

    cls: type
    values: dict[str, Any]


_TENSOR, _CACHE = _Leaf(), _Leaf(is_cache=True)


class Outline:
    """A result without its tensors.

    Attributes:
        tensors: Those of the result it was made from, in order.

    Raises:
        CannotLower: It holds something that is neither a tensor, nor the cache, nor a plain value.
    """

    def __init__(self, result: Any, cache: Any) -> None:
        self.tensors: list[torch.Tensor] = []
        self._outline = self._of(result, cache)

    def _of(self, value: Any, cache: Any) -> Any:
        if value is cache:
            return _CACHE
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return _TENSOR
        if isinstance(value, OrderedDict):
            return _Named(type(value), {name: self._of(each, cache) for name, each in value.items()})
        if type(value) in (tuple, list):
            return type(value)(self._of(each, cache) for each in value)
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise CannotLower(f"returns a {type(value).__name__}")

    def built(self, cache: Any, tensors: Iterator[torch.Tensor]) -> Any:
        """A new result with ``tensors`` and ``cache``."""
        return _built(self._outline, cache, tensors)


def _built(outline: Any, cache: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if outline is _TENSOR:
        return next(tensors)
    if outline is _CACHE:
        return cache
    if type(outline) is _Named:
        return outline.cls(**{name: _built(each, cache, tensors) for name, each in outline.values.items()})
    if type(outline) in (tuple, list):
        return type(outline)(_built(each, cache, tensors) for each in outline)
    return outline
