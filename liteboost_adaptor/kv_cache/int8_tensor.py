"""Rows of integers, with the shape and dtype of the values that they stand for.

What moves, cuts or copies whole rows gives rows again; any other operator reads the values, dequantized.
What is written to values is rounded to rows again. On a CPU the scale of a row lies behind its integers; on
an NPU, whose attention reads no such rows, in a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..ops.int8_attention import SCALE_BYTES, dequantized
from ..report import report

ops = torch.ops.liteboost
counter = report.counter("cache.int8")
aten = torch.ops.aten
#: Operators that give a part of what they are given, through which it can be written, by where they have the
#: dimension. What is written to another view (a transposed one) is written to a copy.
_VIEWS = {
    aten.select.int: 1,
    aten.slice.Tensor: 1,
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
    aten.unbind.int: 1,
}


class Int8KVTensor(torch.Tensor):
    """``[..., head_dim]`` of a floating-point dtype, kept as integers of 8 bits.

    Attributes:
        rows: Of `torch.ops.liteboost.quantize_kv`; where there are ``scales``, the integers alone.
        scales: ``[..., 1]``, fp32, on an NPU; else None.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None

    @staticmethod
    def __new__(
        cls, rows: torch.Tensor, dtype: torch.dtype, scales: torch.Tensor | None = None
    ) -> Int8KVTensor:
        size = rows.shape[-1] - (SCALE_BYTES if scales is None else 0)
        shape = (*rows.shape[:-1], size)
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=rows.device)
        made.rows, made.scales = rows, scales
        return made

    #: Functions of Python are not looked at: what reaches the dispatcher is.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # a C function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's stub has the C function of Tensor itself
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _VIEWS and (found := _views_of_rows(func, *args, **(kwargs or {}))) is not None:
            return found
        counter.count_fallback(f"values read by {func}")
        read: list[tuple[Int8KVTensor, torch.Tensor]] = []

        def values(argument: Any) -> Any:
            if type(argument) is not Int8KVTensor:
                return argument
            read.append((argument, argument.dequantized_kv()))
            return read[-1][1]

        result = func(*pytree.tree_map(values, args), **pytree.tree_map(values, kwargs or {}))
        if not func._schema.is_mutable:
            return result
        for argument, found in read:
            made = rounded(found, argument.scales is not None)
            argument.rows.copy_(made.rows)
            if argument.scales is not None and made.scales is not None:
                argument.scales.copy_(made.scales)
        written = {id(found): argument for argument, found in read}
        return pytree.tree_map(lambda each: written.get(id(each), each), result)

    def dequantized_kv(self) -> torch.Tensor:
        """The values, as an ordinary tensor."""
        return values_of(self.rows, self.scales, self.dtype)

    def each(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Int8KVTensor:
        """Rows of values of the same dtype: of what ``function`` makes of all that these are kept in."""
        scales = None if self.scales is None else function(self.scales)
        return Int8KVTensor(function(self.rows), self.dtype, scales)

    def laid_out(self, is_apart: bool) -> Int8KVTensor:
        """The same rows with scales of their own or behind the integers; a copy where they lie otherwise."""
        if is_apart == (self.scales is not None):
            return self
        if self.scales is None:
            rows, scales = self.rows[..., :-SCALE_BYTES], self.rows[..., -SCALE_BYTES:]
            scales = scales.clone(memory_format=torch.contiguous_format).view(torch.float32)
            return Int8KVTensor(rows.contiguous(), self.dtype, scales)
        scales = self.scales.clone(memory_format=torch.contiguous_format).view(torch.int8)
        return Int8KVTensor(torch.cat([self.rows, scales], dim=-1), self.dtype)

    def __getitem__(self, index: Any) -> torch.Tensor:
        if _keeps_rows(index, self.dim()):
            return self.each(lambda kept: kept[index])
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        value = dequantized_kv(value)
        if _keeps_rows(index, self.dim()):
            given = torch.as_tensor(value, dtype=self.dtype, device=self.device).expand(self[index].shape)
        else:
            given = self.dequantized_kv()
            given[index] = value
            index = ...
        made = rounded(given, self.scales is not None)
        self.rows[index] = made.rows
        if self.scales is not None and made.scales is not None:
            self.scales[index] = made.scales

    def index_select(self, dim: int, index: torch.Tensor) -> torch.Tensor:
        if dim % self.dim() != self.dim() - 1:
            return self.each(lambda kept: kept.index_select(dim, index))
        return super().index_select(dim, index)

    def repeat_interleave(self, repeats: Any, dim: int | None = None, **kwargs: Any) -> torch.Tensor:
        if dim is not None and dim % self.dim() != self.dim() - 1:
            return self.each(lambda kept: kept.repeat_interleave(repeats, dim=dim, **kwargs))
        return super().repeat_interleave(repeats, dim=dim, **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        places = [*args[:1], *(value for name, value in kwargs.items() if name == "device")]
        others = args[1:] or set(kwargs) - {"device", "non_blocking"}
        if len(places) == 1 and not others and isinstance(places[0], str | torch.device | int):
            non_blocking = kwargs.get("non_blocking", False)
            return self.each(lambda kept: kept.to(places[0], non_blocking=non_blocking))
        if args == (self.dtype,) and not kwargs:
            return self
        return super().to(*args, **kwargs)

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.each(lambda kept: kept.cpu(*args, **kwargs))

    def clone(self, **kwargs: Any) -> torch.Tensor:
        return self.each(lambda kept: kept.clone(**kwargs))

    def contiguous(self, **kwargs: Any) -> torch.Tensor:  # type: ignore[override] # by keyword only, as torch
        return self.each(lambda kept: kept.contiguous(**kwargs))

    def detach(self) -> torch.Tensor:
        return self.each(torch.Tensor.detach)

    @property
    def data(self) -> Int8KVTensor:
        return self.each(lambda kept: kept.data)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self[...] = value

    def numpy(self, **kwargs: Any) -> Any:
        return self.dequantized_kv().numpy(**kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Int8KVTensor:
        made = self.each(lambda kept: kept.clone(memory_format=torch.contiguous_format))
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dequantized_kv().__reduce_ex__(protocol)  # it loads where this package is not

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override] # torch's has no types
        return f"Int8KVTensor({self.dequantized_kv()!r})"


def _views_of_rows(func: Any, rows: Any, *args: Any, **kwargs: Any) -> Any:
    """What ``func`` gives of ``rows``; None where it takes rows apart."""
    place = _VIEWS[func] - 1
    dim = args[place] if len(args) > place else kwargs.get("dim", 0)
    if dim % rows.dim() == rows.dim() - 1:
        return None
    found = func(rows.rows, *args, **kwargs)
    scales = func(rows.scales, *args, **kwargs) if rows.scales is not None else None
    if isinstance(found, torch.Tensor):
        return Int8KVTensor(found, rows.dtype, scales)
    return [Int8KVTensor(each, rows.dtype, scales[i] if scales else None) for i, each in enumerate(found)]


def dequantized_kv(tensor: Any) -> Any:
    """``tensor``, or its values where it is rows of integers."""
    return tensor.dequantized_kv() if type(tensor) is Int8KVTensor else tensor


def values_of(rows: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """What rows of integers stand for; ``scales`` are None where they lie behind the integers."""
    if scales is None:
        return dequantized(rows, dtype)
    compute = torch.promote_types(dtype, torch.float32)
    return (rows.to(compute) * scales.to(compute)).to(dtype)


def rounded(values: torch.Tensor, is_apart: bool) -> Int8KVTensor:
    """``values`` as rows of integers, with scales of their own or behind the integers."""
    if not is_apart:
        return Int8KVTensor(ops.quantize_kv(values), values.dtype)
    if values.device.type != "npu":  # what was made there is elsewhere
        return Int8KVTensor(ops.quantize_kv(values), values.dtype).laid_out(True)
    integers, scales = ops._npu_quantize_kv(values)
    return Int8KVTensor(integers, values.dtype, scales)


def lies_apart(x: torch.Tensor) -> bool:
    """Whether rows beside ``x`` have scales of their own: where kernels for an NPU read them."""
    return x.device.type == "npu" and hasattr(ops, "_npu_quantize_kv")


def attend(query: torch.Tensor, key: Int8KVTensor, value: Int8KVTensor, *options: Any) -> torch.Tensor:
    """`torch.ops.liteboost.int8_attention` of rows that lie as they are read on their device."""
    is_apart = lies_apart(query)
    key, value = key.laid_out(is_apart), value.laid_out(is_apart)
    if not is_apart:
        return ops.int8_attention(query, key.rows, value.rows, *options)
    return ops._npu_int8_attention(query, key.rows, key.scales, value.rows, value.scales, *options)


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
