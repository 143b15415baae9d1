"""Tensors that were there before a step, and what a step writes to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

#: Stands for size, dtype, device and strides together.
FORM = "form"
#: Operators that write to statistics of theirs in training, of which their schemas say nothing.
_UNDECLARED = (
    torch.ops.aten.native_batch_norm,
    torch.ops.aten.cudnn_batch_norm,
    torch.ops.aten.miopen_batch_norm,
)
_STATISTICS = ("running_mean", "running_var")
_TRAINING = ("training", "train")


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

    def all(self) -> Iterable[torch.Tensor]:
        """Each of them."""
        return self._tensors.values()

    def find(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The one that ``tensor`` is, or shows the same memory as in the same way."""
        if id(tensor) in self._tensors:
            return tensor
        return self._memory.get(memory(tensor)) if has_memory(tensor) else None


class Written:
    """What a step writes to tensors it has not made, with the values and the form they had."""

    def __init__(self) -> None:
        self._own: set[int] = set()
        #: Tensor, another object for its memory in the form it had, and its values.
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._versions: dict[int, int] = {}

    def made(self, results: Iterable[Any], arguments: Iterable[Any]) -> None:
        """An operator made ``results`` of ``arguments``; memory that none of these had is the step's own."""
        given = {storage(each) for each in arguments if isinstance(each, torch.Tensor)}
        results = (each for each in results if isinstance(each, torch.Tensor) and _is_strided(each))
        self._own.update(key for each in results if (key := storage(each)) not in given)

    def disregard(self, tensor: torch.Tensor) -> None:
        """What is written to the memory of ``tensor`` need not be known."""
        self._own.add(storage(tensor))

    def about_to(self, func: Any, args: Any, kwargs: Any) -> None:
        """``func`` is going to be called: keep the values of what it writes to."""
        for tensor in written_by(func, args, kwargs):
            self.keep(tensor)

    def about_to_call_foreign(self, arguments: Iterable[Any]) -> None:
        """Somebody's operator is going to be called: it may write to what it does not declare.

        Not to parameters, which may be as large as the model.
        """
        for each in arguments:
            if isinstance(each, torch.Tensor) and not isinstance(each, torch.nn.Parameter):
                self.keep(each)

    def keep(self, tensor: torch.Tensor) -> None:
        """Something is going to change ``tensor``: keep what it is, unless the step has made it."""
        if not self.is_own(tensor) and id(tensor) not in self._before:
            self._before[id(tensor)] = tensor, tensor.detach(), tensor.clone()
            self._versions[id(tensor)] = version(tensor)

    def is_own(self, tensor: torch.Tensor) -> bool:
        """Whether the step has made the memory of ``tensor``."""
        return _is_strided(tensor) and storage(tensor) in self._own

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those that were written to and are not the step's own."""
        return [tensor for tensor, _, _ in self._before.values()]

    def counts(self) -> dict[int, int]:
        """Memory, by its storage -> how often the step has written to it, as ``_version`` counts."""
        found: dict[int, int] = {}
        for number, (tensor, _, _) in self._before.items():
            key = storage(tensor)
            found[key] = max(found.get(key, 0), version(tensor) - self._versions[number])
        return found

    def is_reformed(self) -> bool:
        """Whether any of them now lies in memory in another way than before the step."""
        return any(place(tensor) != place(former) for tensor, former, _ in self._before.values())

    def give_back(self) -> None:
        """Give all of them the form and the values they had, and no trace of it in ``_version``."""
        for tensor, former, values in reversed(self._before.values()):
            if place(tensor) != place(former):
                tensor.set_(former.untyped_storage(), former.storage_offset(), former.size(), former.stride())
            write_back(tensor, values, self._versions[id(tensor)])


def writes(func: Any) -> bool:
    """Whether the operator ``func`` may write to its arguments."""
    return func._schema.is_mutable or func.overloadpacket in _UNDECLARED


def written_by(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that a call of the operator ``func`` writes to."""
    arguments = func._schema.arguments
    given = [*zip(arguments, args, strict=False)]
    given += [(each, kwargs[each.name]) for each in arguments if each.name in kwargs]
    is_training = any(each.name in _TRAINING and value for each, value in given)
    for argument, value in given:
        is_declared = argument.alias_info is not None and argument.alias_info.is_write
        if not is_declared and not (is_training and argument.name in _STATISTICS):
            continue
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, torch.Tensor):
                yield tensor


def version(tensor: torch.Tensor) -> int:
    """How often ``tensor`` was written to; 0 for one that does not count."""
    return 0 if tensor.is_inference() else tensor._version


def set_version(tensor: torch.Tensor, number: int) -> None:
    """Have ``tensor`` say that it was written to ``number`` times."""
    if not tensor.is_inference():
        torch._C._autograd._unsafe_set_version_counter((tensor,), (number,))


def write_back(tensor: torch.Tensor, values: torch.Tensor, number: int) -> None:
    """Give ``tensor`` the ``values`` it had when it was written to ``number`` times."""
    # An inference tensor may be written to nowhere else, and what raises for that has written to it already.
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(values)
    set_version(tensor, number)


def storage(tensor: torch.Tensor) -> int:
    """What all tensors have in common that show parts of the same memory; 0 of one without strides."""
    return tensor.untyped_storage()._cdata if _is_strided(tensor) else 0


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


def has_memory(tensor: torch.Tensor) -> bool:
    return _is_strided(tensor) and tensor.numel() > 0


def memory(tensor: torch.Tensor) -> Any:
    """What two tensors have in common that show the same memory in the same way; nothing else has it."""
    return place(tensor) if has_memory(tensor) else id(tensor)


def place(tensor: torch.Tensor) -> Any:
    """Where a tensor lies, and how; nothing of one that has no strides."""
    if not _is_strided(tensor):
        return ()
    found = tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.dtype
    return *found, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def attribute(tensor: torch.Tensor, name: str) -> Any:
    """What Python is told for ``tensor.name``, or by that method; `FORM`: how it lies in memory."""
    if name == FORM:
        return tensor.shape, tensor.dtype, tensor.device, tensor.layout, _strides(tensor)
    found = getattr(tensor, name)
    return found() if callable(found) else found


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout == torch.strided else ()
