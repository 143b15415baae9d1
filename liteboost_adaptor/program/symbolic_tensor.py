"""What stands for a tensor with symbolic sizes while a step is recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

#: Numbers that are computed from symbols.
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class _Named(type(torch.Tensor)):  # type: ignore[misc] # mypy knows no metaclass of a computed base
    """Its class is called what it stands for: transformers guesses by that what a tensor is (`is_tensor`)."""

    def __repr__(cls) -> str:
        return repr(torch.Tensor)


class SymbolicTensor(torch.Tensor, metaclass=_Named):
    """A tensor with symbolic sizes: ``actual`` with the sizes of this step, ``shaped`` with the symbols."""

    actual: torch.Tensor
    shaped: torch.Tensor

    @staticmethod
    def __new__(cls, real: torch.Tensor, fake: torch.Tensor) -> SymbolicTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            fake.shape,
            strides=fake.stride(),
            storage_offset=fake.storage_offset(),
            dtype=real.dtype,
            device=real.device,
            layout=real.layout,
        )
        made.actual, made.shaped = real, fake
        return made

    @property
    def __class__(self) -> type:
        """What ``isinstance`` and the model's code are told; ``type`` tells what it is."""
        return torch.Tensor

    @__class__.setter
    def __class__(self, cls: type) -> None:
        raise TypeError("a tensor of a step that is recorded keeps its class")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's stub has the C function of Tensor itself
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Somebody has kept it where nobody looks for it, and goes on with it behind the step.
        args, kwargs = pytree.tree_map(real_of, (args, kwargs or {}))
        return func(*args, **kwargs)


def is_untouched(tensor: torch.Tensor) -> bool:
    """Whether nobody has written an attribute on what stands for a tensor."""
    return vars(tensor).keys() <= {"actual", "shaped"}


def real_of(value: Any) -> Any:
    """``value`` as it is, without symbols."""
    if type(value) is SymbolicTensor:
        return value.actual
    return value.node.hint if isinstance(value, SYMBOLIC) else value
