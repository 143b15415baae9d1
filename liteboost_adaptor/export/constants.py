"""The tensors that programs hold, by name: those of the model by the name they have there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.files import NAMES
from ..checkpoint.writing import Writer
from ..errors import ExportError


class Constants:
    """Collects tensors of programs.

    Attributes:
        tensors: Name -> the tensor as a file holds it: contiguous.
        orders: Name -> for what is a transposed view of that, which dimension of the file each of its own is.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        named: Iterable[tuple[str, torch.Tensor]] = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        self._known: dict[Any, str] = {}
        for name, tensor in named:
            self._known.setdefault(_place(tensor), name)
        self._alive: list[torch.Tensor] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.orders: dict[str, list[int]] = {}

    def name(self, tensor: torch.Tensor) -> str:
        """The name of ``tensor``, which is stored from now on.

        Raises:
            ExportError: No file holds tensors of its kind.
        """
        if tensor.dtype not in NAMES or tensor.layout != torch.strided:
            raise ExportError(f"it computes with a constant of {tensor.dtype} or {tensor.layout}")
        place = _place(tensor)
        name = self._known.get(place)
        if name is None:
            name = self._known[place] = f"constant.{len(self.tensors)}"
            self._alive.append(tensor)  # or another would come to lie at its address
        if name not in self.tensors:
            self._store(name, tensor.detach())
        return name

    def _store(self, name: str, tensor: torch.Tensor) -> None:
        order = sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim))
        stored = tensor.permute(order)
        if tensor.is_contiguous() or not stored.is_contiguous():
            self.tensors[name] = tensor.contiguous()
            return
        self.tensors[name] = stored
        self.orders[name] = [order.index(dim) for dim in range(tensor.dim())]

    def write(self, path: Path) -> None:
        """A safetensors file with all of them."""
        writer = Writer(path, {name: (each.dtype, tuple(each.shape)) for name, each in self.tensors.items()})
        try:
            for name, tensor in self.tensors.items():
                writer.put(name, tensor)
            writer.close()
        except BaseException:
            writer.discard()
            raise


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where and as what it lies."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
