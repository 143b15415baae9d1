"""The memory layout of results: that of the original code, so that a ``view`` behind it finds its strides.

The ops return contiguous tensors, as ``torch.nn.functional.layer_norm`` does. Elementwise functions, of which
most originals are made, lay their result out as their first argument: a transposed one makes it transposed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def elementwise(op: Callable[..., Any], first: torch.Tensor, *rest: Any, fixed: int) -> Any:
    """``op(first, *rest)``, laid out as an elementwise function of torch would lay it out.

    Where ``first`` is transposed, the op works on the dimensions in the order they have in memory, so that
    no rows are copied, neither before nor behind it.

    Args:
        op: Returns contiguous tensors of the shape of ``first``: one, or a tuple of them.
        first: The argument that comes first in the original.
        rest: Other arguments; tensors of the shape of ``first`` are transposed with it.
        fixed: How many of the last dimensions the op wants where they are: none for an activation, one for
            a norm, two for a norm of groups.
    """
    if first.is_contiguous():
        return op(first, *rest)
    order = memory_order(first)
    ordered = list(range(first.ndim))
    if order == ordered:
        return op(first, *rest)
    if order[first.ndim - fixed :] != ordered[first.ndim - fixed :]:
        return _each(op(first, *rest), lambda out: torch.empty_like(first, dtype=out.dtype).copy_(out))
    shape = first.shape
    turned = (
        x.permute(order) if isinstance(x, torch.Tensor) and x.shape == shape else x for x in (first, *rest)
    )
    back = [order.index(dim) for dim in ordered]
    return _each(op(*turned), lambda out: out.permute(back))


def memory_order(x: torch.Tensor) -> list[int]:
    """The dimensions of ``x`` from the outermost in memory to the innermost, as torch's elementwise ops sort.

    Dimensions of one element may stand anywhere, and stand first. Expanded ones say nothing about an order:
    with them it is that of the dimensions themselves.
    """
    shape, strides = x.shape, x.stride()
    order = [dim for dim in range(x.ndim) if shape[dim] == 1]
    ones = len(order)
    for dim in range(x.ndim):
        if shape[dim] == 1:
            continue
        if strides[dim] == 0:
            return list(range(x.ndim))
        place = len(order)
        while place > ones and strides[order[place - 1]] < strides[dim]:
            place -= 1
        order.insert(place, dim)
    return order


def _each(result: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return tuple(map(change, result)) if isinstance(result, tuple) else change(result)
