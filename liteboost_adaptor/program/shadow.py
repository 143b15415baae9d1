"""Shadow checks: now and then the original runs beside a program; what both give is compared to the bit.

On a CPU: an NPU's programs merge operators into others, which round otherwise.
"""

from __future__ import annotations

from typing import Any

import torch

from .program import Program, Run
from .recording import CannotLower
from .result import Outline
from .step_call import StepCall
from .tensors import set_version, version

#: Beside the 1st, 2nd, 4th, 8th … run, and beside every one of this many.
INTERVAL = 1024


def is_due(runs: int) -> bool:
    """Whether the run behind ``runs`` others is checked."""
    number = runs + 1
    return number & (number - 1) == 0 or number % INTERVAL == 0


class Shadow:
    """One run of a program, kept aside until the original has run.

    Args:
        run: What the program gave.
        writes: Tensors that were there before, to which it has written, with the values they had.
    """

    def __init__(self, run: Run, writes: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._run = run
        self._written = [(tensor, tensor.clone()) for tensor, _ in writes]
        for tensor, before in writes:
            tensor.copy_(before)
        # The original writes to the same positions.
        self._rows = [
            (key, _behind(buffer.memory, buffer.dim, buffer.end, count).clone())
            for key, buffer, count in run.appended
        ]
        memories = {buffer.memory.untyped_storage()._cdata for _, buffer, _ in run.appended}
        self._results = [None if _shows(each, memories) else each.clone() for each in run.results]
        self._kept = {key: each.clone() for key, each in run.kept.items() if not _shows(each, memories)}

    def difference(self, program: Program, result: Any, cache: Any) -> str:
        """What is not as the original gave or kept it, or an empty string."""
        try:
            outline = Outline(result, cache)
        except CannotLower:
            return "the form of the result"
        if not outline.is_like(program.outline):
            return "the form of the result"
        for name, given, theirs in zip(outline.names, self._results, outline.tensors, strict=True):
            if given is not None and not _is_same(given, theirs):
                return name
        owns = self._run.owns
        for (holder, name), mine in self._rows:
            kept = owns[holder].get(name)
            buffer = next(buffer for key, buffer, _ in self._run.appended if key == (holder, name))
            if not isinstance(kept, torch.Tensor):
                return f"{name} of the cache"
            # A window may be shorter than what is appended.
            count = min(kept.size(buffer.dim), mine.size(buffer.dim))
            if not count or not _is_same(_last(mine, buffer.dim, count), _last(kept, buffer.dim, count)):
                return f"{name} of the cache"
        for (holder, name), mine in self._kept.items():
            kept = owns[holder].get(name)
            if not isinstance(kept, torch.Tensor) or not _is_same(mine, kept):
                return f"{name} of the cache"
        for (holder, name), mine in self._run.numbers.items():
            if owns[holder].get(name) != mine:
                return f"{name} of the cache"
        for tensor, mine in self._written:
            if not _is_same(mine, tensor):
                return "a tensor that the step writes to"
        return ""


def checked(program: Program, step: StepCall, symbols: list[int]) -> tuple[Any, str] | str:
    """The original's result and what is not so in the program's; or why the program stopped."""
    cache, kwargs = step.cache, step.given
    writes = [(tensor, tensor.clone()) for tensor in program.writes(cache, kwargs)]
    versions = [version(tensor) for tensor, _ in writes]
    fault, shadow, kept = "", None, []
    try:
        run = program.run(cache, kwargs, symbols)
        if isinstance(run, str):
            return run
        shadow, kept = Shadow(run, writes), step.kept()
    except Exception as raised:  # noqa: BLE001 - reported, and the original runs
        for tensor, before in writes:
            tensor.copy_(before)
        fault = f"nothing: {type(raised).__name__}: {str(raised).splitlines()[:1]}"
    for (tensor, _), number in zip(writes, versions, strict=True):
        set_version(tensor, number)  # the original counts by itself
    result = step.original()
    if program.is_closed:  # the model was bound anew while it ran, and computes in another way
        return result, ""
    if shadow is None:
        return result, fault
    if not all(map(_is_same, kept, step.kept())):
        return result, "what it writes to the cache"
    return result, shadow.difference(program, result, cache)


def _behind(memory: torch.Tensor, dim: int, end: int, count: int) -> torch.Tensor:
    return memory.narrow(dim, end, count)


def _last(tensor: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    return tensor.narrow(dim, tensor.size(dim) - count, count)


def _shows(tensor: torch.Tensor, memories: set[int]) -> bool:
    return tensor.layout == torch.strided and tensor.untyped_storage()._cdata in memories


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether shape, dtype and every bit are the same; one NaN is as good as another."""
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    if one.layout != torch.strided:
        return torch.equal(one, other)
    if torch.equal(_bits(one), _bits(other)):
        return True
    if not one.is_floating_point():
        return False
    nowhere = one.isnan()
    mine, theirs = one.masked_fill(nowhere, 0), other.masked_fill(other.isnan(), 0)
    return torch.equal(nowhere, other.isnan()) and torch.equal(_bits(mine), _bits(theirs))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return plain.contiguous().view(torch.uint8) if plain.dim() else plain.reshape(1).view(torch.uint8)
