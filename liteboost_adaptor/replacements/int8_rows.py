"""Rows of integers, with the shape and dtype of the values that they stand for.

What moves, cuts or copies whole rows gives rows again; any other operator reads the values, multiplied out.
What is written to values is rounded to rows again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..ops.int8_attention import SCALE_BYTES, dequantized
from ..report import report

ops = torch.ops.liteboost
tally = report.tally("cache.int8")


class Int8Rows(torch.Tensor):
    """``[..., head_dim]`` of a floating-point dtype, kept as ``rows`` of `torch.ops.liteboost.int8_rows`."""

    rows: torch.Tensor

    @staticmethod
    def __new__(cls, rows: torch.Tensor, dtype: torch.dtype) -> Int8Rows:
        shape = (*rows.shape[:-1], rows.shape[-1] - SCALE_BYTES)
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=rows.device)
        made.rows = rows
        return made

    #: Functions of Python are not looked at: what reaches the dispatcher is.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tally.fell_back(f"values read by {func}")
        read: list[tuple[Int8Rows, torch.Tensor]] = []

        def values(argument: Any) -> Any:
            if type(argument) is not Int8Rows:
                return argument
            read.append((argument, argument.multiplied_out()))
            return read[-1][1]

        result = func(*pytree.tree_map(values, args), **pytree.tree_map(values, kwargs or {}))
        if not func._schema.is_mutable:
            return result
        for argument, found in read:
            argument.rows.copy_(ops.int8_rows(found))
        written = {id(found): argument for argument, found in read}
        return pytree.tree_map(lambda each: written.get(id(each), each), result)

    def multiplied_out(self) -> torch.Tensor:
        """The values, as an ordinary tensor."""
        return dequantized(self.rows, self.dtype)

    def like(self, rows: torch.Tensor) -> Int8Rows:
        """``rows`` of values of the same dtype."""
        return Int8Rows(rows, self.dtype)

    def __getitem__(self, index: Any) -> torch.Tensor:
        if _keeps_rows(index, self.dim()):
            return self.like(self.rows[index])
        return super().__getitem__(index)

    def index_select(self, dim: int, index: torch.Tensor) -> torch.Tensor:
        if dim % self.dim() != self.dim() - 1:
            return self.like(self.rows.index_select(dim, index))
        return super().index_select(dim, index)

    def repeat_interleave(self, repeats: Any, dim: int | None = None, **kwargs: Any) -> torch.Tensor:
        if dim is not None and dim % self.dim() != self.dim() - 1:
            return self.like(self.rows.repeat_interleave(repeats, dim=dim, **kwargs))
        return super().repeat_interleave(repeats, dim=dim, **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        places = [*args[:1], *(value for name, value in kwargs.items() if name == "device")]
        others = args[1:] or set(kwargs) - {"device", "non_blocking"}
        if len(places) == 1 and not others and isinstance(places[0], str | torch.device | int):
            return self.like(self.rows.to(places[0], non_blocking=kwargs.get("non_blocking", False)))
        if args == (self.dtype,) and not kwargs:
            return self
        return super().to(*args, **kwargs)

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.like(self.rows.cpu(*args, **kwargs))

    def clone(self, **kwargs: Any) -> torch.Tensor:
        return self.like(self.rows.clone(**kwargs))

    def contiguous(self, **kwargs: Any) -> torch.Tensor:
        return self.like(self.rows.contiguous(**kwargs))

    def detach(self) -> torch.Tensor:
        return self.like(self.rows.detach())

    def __deepcopy__(self, memo: dict[int, Any]) -> Int8Rows:
        made = memo[id(self)] = self.like(self.rows.clone(memory_format=torch.contiguous_format))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.multiplied_out().__reduce_ex__(protocol)  # it loads where this package is not

    def __repr__(self, **kwargs: Any) -> str:
        return f"Int8Rows({self.multiplied_out()!r})"


def multiplied_out(tensor: Any) -> Any:
    """``tensor``, or its values where it is rows of integers."""
    return tensor.multiplied_out() if type(tensor) is Int8Rows else tensor


def _keeps_rows(index: Any, dims: int) -> bool:
    """Whether ``index`` leaves the last of ``dims`` dimensions as it is."""
    parts = index if isinstance(index, tuple) else (index,)
    named = [part for part in parts if part is not Ellipsis]
    for part in named:
        if type(part) not in (int, slice) and not (type(part) is torch.Tensor and part.dtype == torch.int64):
            return False
    if len(named) < dims and (len(named) == len(parts) or parts[-1] is Ellipsis):
        return True
    return type(parts[-1]) is slice and parts[-1] == slice(None)
