"""What a forward returns, as an outline that tensors are put into."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .ragged import RaggedBatch
from .recording import CannotLower


@dataclass(frozen=True)
class _Tensor:
    """A tensor, by number: one that is there twice has one."""

    number: int


@dataclass(frozen=True)
class _Shared:
    """A container that has come before."""

    number: int


@dataclass(frozen=True)
class _Container:
    """A tuple, list or dict, or one of transformers' outputs with the attributes it has beside its items."""

    number: int
    cls: type
    items: Any
    attributes: Any = None


_CACHE = object()


class Outline:
    """A result without its tensors.

    Attributes:
        tensors: Those of the result it was made from, each once, in order.
        names: Where each of them was first found.

    Raises:
        CannotLower: It holds something that is neither a tensor, nor the cache, nor a plain value.
    """

    def __init__(self, result: Any, cache: Any) -> None:
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        self._numbers: dict[int, Any] = {}
        self._caches, self._count = (cache, _of_caller(cache)), 0
        self._outline = self._of(result, "the result")
        del self._caches, self._numbers

    def _of(self, value: Any, name: str) -> Any:
        if any(value is each for each in self._caches):
            return _CACHE
        if value is None or type(value) in (bool, int, float, str):
            return value
        known = self._numbers.get(id(value))
        if known is not None:
            return known
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            self.names.append(name)
            made = self._numbers[id(value)] = _Tensor(len(self.tensors) - 1)
            return made
        number = self._count
        self._count += 1
        self._numbers[id(value)] = _Shared(number)
        if isinstance(value, OrderedDict) and type(getattr(value, "__dict__", None)) is dict:
            return _Container(number, type(value), self._named(value, name), self._named(vars(value), name))
        if type(value) is dict:
            return _Container(number, dict, self._named(value, name))
        if type(value) in (tuple, list):
            items = tuple(self._of(each, f"{name}[{at}]") for at, each in enumerate(value))
            return _Container(number, type(value), items)
        raise CannotLower(f"returns a {type(value).__name__}")

    def _named(self, values: dict[Any, Any], name: str) -> tuple[tuple[Any, Any], ...]:
        if not all(type(key) in (str, int) for key in values):
            raise CannotLower("returns a dict whose keys are neither words nor numbers")
        return tuple((key, self._of(each, f"{name}.{key}")) for key, each in values.items())

    def is_like(self, other: Outline) -> bool:
        """Whether they are the same but for their tensors."""
        return self._outline == other._outline

    def built(self, cache: Any, tensors: Sequence[torch.Tensor]) -> Any:
        """A new result with ``tensors`` and ``cache``."""
        return _built(self._outline, _of_caller(cache), tensors, {})


def _of_caller(cache: Any) -> Any:
    """The cache that the caller knows."""
    return cache.cache if type(cache) is RaggedBatch else cache


def _built(outline: Any, cache: Any, tensors: Sequence[torch.Tensor], made: dict[int, Any]) -> Any:
    kind = type(outline)
    if kind is _Tensor:
        return tensors[outline.number]
    if outline is _CACHE:
        return cache
    if kind is _Shared:
        return made[outline.number]
    if kind is not _Container:
        return outline
    cls = outline.cls
    result: Any
    if cls is tuple or cls is list:
        result = cls(_built(each, cache, tensors, made) for each in outline.items)
    elif cls is dict:
        result = {key: _built(each, cache, tensors, made) for key, each in outline.items}
    else:
        # Without its __init__, which takes no more than its fields: as it was when it was returned.
        result = cls.__new__(cls)
        for key, each in outline.items:
            OrderedDict.__setitem__(result, key, _built(each, cache, tensors, made))
        vars(result).update((key, _built(each, cache, tensors, made)) for key, each in outline.attributes)
    made[outline.number] = result
    return result
