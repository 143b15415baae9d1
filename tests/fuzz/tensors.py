"""Tensors to fuzz with: any size, stride and offset, in an allocation that ends where they end.

Every element of the allocation that the tensor does not show is NaN, and the allocation is as small as the
tensor allows, so that the address sanitizer sees the first byte read or written before or beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
#: Around the vector lengths of every instruction set, then anything.
WIDTHS = st.one_of(
    st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129]),
    st.integers(0, 300),
)
COUNTS = st.sampled_from([1, 2, 3, 1, 5, 7, 2, 0, 1, 17])
SCALES = st.sampled_from([1.0, 1.0, 1e-3, 30.0])
#: Small work stays on one thread; of the rest, some is split.
MOST = 12_000

LAYOUTS = st.sampled_from(
    ["contiguous", "contiguous", "offset", "gaps", "step", "permuted", "expanded", "overlapping", "mixed"]
)


#: For what is written to: each element in a place of its own.
WRITABLE = st.sampled_from(["contiguous", "contiguous", "offset", "gaps", "step", "permuted", "mixed"])
Layouts = st.SearchStrategy[str]


def shape(draw: DrawFn, leading: int | None = None, width: int | None = None) -> tuple[int, ...]:
    """``[..., width]`` with ``leading`` or up to three leading dimensions; now and then a large one."""
    width = draw(WIDTHS) if width is None else width
    dims = draw(st.integers(0, 3)) if leading is None else leading
    if dims == 1 and draw(st.integers(0, 9)) == 0:
        return draw(st.integers(40, 90)), width
    sizes: list[int] = []
    for _ in range(dims):
        size = draw(COUNTS)
        sizes.append(size if math.prod(sizes) * size * width <= MOST else 1)
    return (*sizes, width)


def tensor(
    draw: DrawFn, size: Sequence[int], dtype: torch.dtype, scale: float = 1.0, layouts: Layouts = LAYOUTS
) -> Tensor:
    """A tensor of normal numbers times ``scale``; bool is true in seven of ten places."""
    strides, offset = _layout(draw, size, layouts)
    elements = _elements(size, strides, offset)
    if dtype == torch.bool:
        return (torch.rand(elements) < 0.7).as_strided(size, strides, offset)
    values = torch.randn(elements).mul_(scale).to(dtype)
    shown = torch.zeros(elements, dtype=torch.bool)
    shown.as_strided(size, strides, offset).fill_(True)
    return values.masked_fill_(~shown, math.nan).as_strided(size, strides, offset)


def maybe(draw: DrawFn, size: Sequence[int], dtype: torch.dtype, scale: float = 1.0) -> Tensor | None:
    """`tensor`, or None one time in four."""
    return tensor(draw, size, dtype, scale) if draw(st.integers(0, 3)) else None


def same_or_float32(draw: DrawFn, dtype: torch.dtype) -> torch.dtype:
    """What most parameters may be beside an input of ``dtype``."""
    return draw(st.sampled_from([dtype, torch.float32]))


def _elements(size: Sequence[int], strides: Sequence[int], offset: int) -> int:
    """How many elements the smallest allocation has that holds such a view."""
    if 0 in size:
        return offset
    return offset + 1 + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))


def _layout(draw: DrawFn, size: Sequence[int], layouts: Layouts) -> tuple[list[int], int]:
    """Strides and storage offset."""
    kind = draw(layouts)
    dims = len(size)
    order = list(range(dims))
    if kind in ("permuted", "mixed"):
        order = draw(st.permutations(order))
    stepped = draw(st.integers(0, dims - 1)) if dims and kind in ("step", "mixed") else None
    strides, run = [0] * dims, 1
    for dim in reversed(order):
        strides[dim] = run * (draw(st.integers(2, 3)) if dim == stepped else 1)
        run = strides[dim] * max(size[dim], 1)
        if kind in ("gaps", "mixed"):
            run += draw(st.integers(1, 9))
    if dims and kind in ("expanded", "overlapping"):
        dim = draw(st.integers(0, dims - 1))
        strides[dim] = 0 if kind == "expanded" else draw(st.integers(1, 2))
    offset = draw(st.integers(1, 17)) if kind in ("offset", "mixed") else 0
    return strides, offset
