"""What ranks do to test the collectives themselves."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from parallel import ranks

from liteboost_adaptor.parallel.runtime import groups

ops = torch.ops.liteboost_parallel
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: Below, at and above what goes through shared memory in one round, and in several pieces.
COUNTS = (1, 7, 1000, 16 * 1024 + 1, 300_000)


def _input(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + count)
    return torch.randn(count, generator=generator).to(dtype)


def sums() -> dict[str, Any]:
    """How far sums are from those of float64, in units of rounding; whether all ranks have the same bits.

    Units are those of the sum where it is rounded once, else of the sum of magnitudes: what the first ranks
    have together is rounded before the others take most of it away.
    """
    group = groups.join()
    found: dict[str, Any] = {"shared": ops._shares_memory(group.name)}
    for way in ("shared memory", "process group"):
        if way == "process group":
            ops._unshare_memory(group.name)
        for name, dtype in DTYPES.items():
            for count in COUNTS:
                x = _input(group.rank, count, dtype)
                result = ops.all_reduce(x, group.name)
                parts = torch.stack([_input(rank, count, dtype).double() for rank in range(group.size)])
                exact = parts.sum(0)
                is_rounded_once = group.size == 2 or (way == "shared memory" and dtype != torch.float32)
                rounded = exact.abs() if is_rounded_once else parts.abs().sum(0)
                ulps = (result.double() - exact).abs() / (rounded * torch.finfo(dtype).eps + 1e-6)
                copies = [torch.empty_like(result) for _ in range(group.size)]
                dist.all_gather(copies, result)
                same = all(torch.equal(copy, result) for copy in copies)
                found[f"{way} {name} {count}"] = (ulps.max().item(), same)
    return found


def details() -> dict[str, Any]:
    """Strides, no elements, dispatch modes, parts of different sizes, what is refused."""
    group = groups.join()
    size, rank = group.size, group.rank
    wide = torch.arange(24.0).reshape(4, 6)
    sizes = [3 + each for each in range(size)]
    gathered = ops.all_gather(torch.full((2, sizes[rank]), float(rank)), sizes, group.name)
    wanted = torch.cat([torch.full((2, each), float(other)) for other, each in enumerate(sizes)], -1)
    found = {
        "strided": torch.equal(ops.all_reduce(wide.t(), group.name), wide.t() * size),
        "contiguous": ops.all_reduce(wide.t(), group.name).is_contiguous(),
        "in place": _in_place(wide, group),
        "empty": list(ops.all_reduce(torch.empty(0, 3), group.name).shape),
        "input_kept": torch.equal(wide, torch.arange(24.0).reshape(4, 6)),
        "gathered": torch.equal(gathered, wanted),
        "gathered in pieces": _gathered_in_pieces(group),
        "meta": list(ops.all_gather(torch.empty(2, 5, device="meta"), [5, 7], group.name).shape),
    }
    refused = {
        "grad": lambda: ops.all_reduce(wide.clone().requires_grad_(), group.name),
        "dtype": lambda: ops.all_reduce(wide.double(), group.name),
        "sizes": lambda: ops.all_gather(wide, [1] * size, group.name),
    }
    for name, call in refused.items():
        try:
            call()
            found[name] = "nothing raised"
        except (RuntimeError, ValueError, TypeError) as fault:
            found[name] = str(fault).splitlines()[0]
    return found


def _in_place(wide: torch.Tensor, group: groups.Group) -> bool:
    """Whether sums are written to what was given, whatever its strides, small and large."""
    right = []
    for x in (wide.clone(), wide.clone().t(), torch.ones(700_001, dtype=torch.bfloat16)):
        before, address = x.clone(), x.data_ptr()
        result = ops.all_reduce_(x, group.name)
        right.append(result is x and x.data_ptr() == address and torch.equal(x, before * group.size))
    return all(right)


def _gathered_in_pieces(group: groups.Group) -> list[bool]:
    """Rows that no slot of the shared memory holds, of several dtypes and lengths; one rank brings none."""
    found = []
    cases = {torch.float32: [300_001, 7], torch.bfloat16: [5, 700_000], torch.float16: [0, 9]}
    for dtype, first in cases.items():
        sizes = [*first, *[3] * (group.size - 2)]
        parts = [_input(rank, 3 * size, dtype).reshape(3, size) for rank, size in enumerate(sizes)]
        gathered = ops.all_gather(parts[group.rank], sizes, group.name)
        found.append(torch.equal(gathered, torch.cat(parts, -1)))
    return found


def other_sizes() -> str:
    """What is said where ranks come with tensors of different sizes."""
    group = groups.join()
    try:
        ops.all_reduce(torch.ones(10 + group.rank), group.name)
    except RuntimeError as fault:
        return str(fault).splitlines()[0]
    return "nothing raised"


def two_ranks() -> dict[str, Any]:
    """All that needs no start of its own."""
    return {"other sizes": other_sizes(), "details": details(), "sums": sums()}


def one_ends() -> dict[str, Any]:
    """Rank 1 ends in the middle; what the others say, and how long after."""
    group = groups.join()
    ops.all_reduce(torch.ones(10), group.name)
    if group.rank == 1:
        os._exit(0)
    start = time.monotonic()
    try:
        ops.all_reduce(torch.ones(10), group.name)
        text = "nothing raised"
    except RuntimeError as fault:
        text = str(fault).splitlines()[0]
    ranks.report({"text": text, "seconds": time.monotonic() - start})
    os._exit(0)  # the process group would wait for the rank that is gone
