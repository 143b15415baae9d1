"""Tensors that were there before a step, and what a step writes to them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

#: Stands for size, dtype, device and strides together.
FORM = "form"


class Known:
    """Tensors that existed before a step: what nothing in it has made may be one of these."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors: dict[int, torch.Tensor] = {}
        # By `.data` and `.detach()` torch makes another object for the same memory without a word.
        self._memory: dict[Any, torch.Tensor] = {}
        self.add(tensors)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """``tensors`` were there, too."""
        for tensor in tensors:
            self._tensors[id(tensor)] = tensor
            if has_memory(tensor):
                self._memory[memory(tensor)] = tensor

    def find(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The one that ``tensor`` is, or shows the same memory as in the same way."""
        if id(tensor) in self._tensors:
            return tensor
        return self._memory.get(memory(tensor)) if has_memory(tensor) else None


class Written:
    """What a step writes to tensors it has not made, with the values they had."""

    def __init__(self) -> None:
        self._own: set[int] = set()
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor, _Form | None]] = {}

    def made(self, results: Iterable[Any], arguments: Iterable[Any]) -> None:
        """An operator made ``results`` of ``arguments``; memory that none of these had is the step's own."""
        given = {_storage(each) for each in arguments if isinstance(each, torch.Tensor)}
        results = (each for each in results if isinstance(each, torch.Tensor) and has_memory(each))
        self._own.update(storage for each in results if (storage := _storage(each)) not in given)

    def about_to(self, func: Any, args: Any, kwargs: Any) -> None:
        """``func`` is going to be called: keep the values of what it writes to."""
        arguments = func._schema.arguments
        given = [*zip(arguments, args, strict=False)]
        given += [(each, kwargs[each.name]) for each in arguments if each.name in kwargs]
        for argument, value in given:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, torch.Tensor) and not self.is_own(tensor):
                    self._before.setdefault(id(tensor), (tensor, tensor.clone(), _form_of(tensor)))

    def is_own(self, tensor: torch.Tensor) -> bool:
        """Whether the step has made the memory of ``tensor``."""
        return has_memory(tensor) and _storage(tensor) in self._own

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those that were written to and are not the step's own."""
        return [tensor for tensor, *_ in self._before.values()]

    def give_back(self) -> None:
        """Give all of them the form and the values they had."""
        for tensor, values, form in reversed(self._before.values()):
            if _form_of(tensor) != form:
                tensor.as_strided_(*form)
            tensor.copy_(values)


_Form = tuple[torch.Size, tuple[int, ...], int]


def _form_of(tensor: torch.Tensor) -> _Form | None:
    """What an operator may change of it in place, beside values."""
    if tensor.layout != torch.strided:
        return None
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0


def has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.numel() > 0


def memory(tensor: torch.Tensor) -> Any:
    """What two tensors have in common that show the same memory in the same way; nothing else has it."""
    if not has_memory(tensor):
        return id(tensor)
    place = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return *place, tensor.dtype, tensor.shape, tensor.stride()


def attribute(tensor: torch.Tensor, name: str) -> Any:
    """What Python is told for ``tensor.name``, or by that method; `FORM`: how it lies in memory."""
    if name == FORM:
        return tensor.shape, tensor.dtype, tensor.device, tensor.layout, _strides(tensor)
    found = getattr(tensor, name)
    return found() if callable(found) else found


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout == torch.strided else ()
