"""Collectives as ops: ``torch.ops.liteboost_parallel.all_reduce``, ``all_reduce_`` and ``all_gather``.

They have a namespace of their own, because what several processes compute together has no reference that one
process could be compared with. Without the compiled library the same names call ``torch.distributed``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

NAMESPACE = "liteboost_parallel"
_LIBRARIES: list[torch.library.Library] = []


def _group(name: str) -> dist.ProcessGroup:
    # Imported there in every version of torch that is served; 2.13's stub has a type of its own for names.
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def all_reduce(x: Tensor, group: str) -> Tensor:
    """The sum of ``x`` over the ranks of a process group.

    Args:
        x: fp32/bf16/fp16, any strides; the same shape and dtype on every rank.
        group: Name of a process group of ``torch.distributed``.

    Returns:
        Shape and dtype of ``x``, contiguous, the same bits on every rank.

    Raises:
        DTypeError: ``x`` has another dtype.
        RuntimeError: A rank has ended, or has not come within the time limit of the group.

    Numerics:
        Between ranks that share memory added in fp32 in the order of the ranks and rounded once; else as the
        backend of the group adds.

    Source:
        ``torch.distributed.all_reduce``.
    """
    result = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, group=_group(group))
    return result


def all_reduce_of(x: Tensor, same: Tensor, group: str) -> Tensor:
    """`all_reduce`, of ranks that work on the same thing.

    Args:
        x, group: As of `all_reduce`.
        same: The same bits on every rank: the tokens that ``x`` was computed from. Compared where ranks share
            memory.

    Returns:
        As of `all_reduce`.

    Raises:
        DTypeError: As of `all_reduce`.
        RuntimeError: As of `all_reduce`; or ``same`` is not the same on every rank.

    Numerics:
        As of `all_reduce`.

    Source:
        ``torch.distributed.all_reduce``.
    """
    return all_reduce(x, group)


def all_reduce_(x: Tensor, group: str) -> Tensor:
    """`all_reduce`, written to ``x`` itself, which spares a copy where a process group adds in place.

    Args:
        x, group: As of `all_reduce`.

    Returns:
        ``x``.

    Raises:
        DTypeError, RuntimeError: As of `all_reduce`.

    Numerics:
        As of `all_reduce`.

    Source:
        ``torch.distributed.all_reduce``.
    """
    whole = x.contiguous()
    dist.all_reduce(whole, group=_group(group))
    return x if whole is x else x.copy_(whole)


def all_gather(x: Tensor, sizes: Sequence[int], group: str) -> Tensor:
    """The ``x`` of all ranks, one behind the other along the last dimension.

    Args:
        x: ``[..., sizes[rank]]``, fp32/bf16/fp16; the other dimensions are the same on every rank.
        sizes: The last dimension of ``x`` on each rank.
        group: As in `all_reduce`.

    Returns:
        ``[..., sum(sizes)]``, dtype of ``x``, contiguous.

    Raises:
        ShapeError: ``x`` is not as long as ``sizes`` says.
        DTypeError: As in `all_reduce`.
        RuntimeError: As in `all_reduce`.

    Numerics:
        Copies.

    Source:
        ``torch.distributed.all_gather``.
    """
    ranks = _group(group)
    padded = torch.nn.functional.pad(x, (0, max(sizes) - x.shape[-1])).contiguous()
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=ranks)
    return torch.cat([part[..., :size] for part, size in zip(gathered, sizes, strict=True)], dim=-1)


def register() -> None:
    """Define the ops on ``torch.distributed`` where the compiled library has not defined them. Idempotent."""
    if torch._C._dispatch_has_kernel(f"{NAMESPACE}::all_reduce"):
        return
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    _LIBRARIES.append(library)
    library.define("all_reduce(Tensor x, str group) -> Tensor")
    library.define("all_reduce_of(Tensor x, Tensor same, str group) -> Tensor")
    library.define("all_reduce_(Tensor(a!) x, str group) -> Tensor(a!)")
    library.define("all_gather(Tensor x, SymInt[] sizes, str group) -> Tensor")
    library.impl("all_reduce", all_reduce, "CompositeExplicitAutograd")
    library.impl("all_reduce_of", all_reduce_of, "CompositeExplicitAutograd")
    library.impl("all_reduce_", all_reduce_, "CompositeExplicitAutograd")
    library.impl("all_gather", all_gather, "CompositeExplicitAutograd")
    library.impl("all_reduce", lambda x, group: torch.empty(x.shape, dtype=x.dtype, device=x.device), "Meta")
    library.impl(
        "all_reduce_of",
        lambda x, same, group: torch.empty(x.shape, dtype=x.dtype, device=x.device),
        "Meta",
    )
    library.impl("all_reduce_", lambda x, group: x, "Meta")
    library.impl(
        "all_gather",
        lambda x, sizes, group: x.new_empty((*x.shape[:-1], sum(sizes))),
        "Meta",
    )
