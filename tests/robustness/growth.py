"""Whether a repeated action leaves something behind: memory of the process, Python objects, tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

WARM_UP = 40
ROUNDS = 200
SAMPLES = 20


@dataclass
class Growth:
    """What ROUNDS rounds added; ``noise`` is how far the samples of memory lie from a straight line."""

    bytes: float
    noise: float
    objects: int
    tensors: int


def measure(action: Callable[[], object]) -> Growth:
    """Growth over ROUNDS rounds of ``action``, after a warm-up."""
    for _ in range(WARM_UP):
        action()
    process = psutil.Process()
    first = _live()
    memory = []
    for _ in range(SAMPLES):
        for _ in range(ROUNDS // SAMPLES):
            action()
        gc.collect()
        memory.append(process.memory_info().rss)
    last = _live()
    # A line through the samples: one allocation that comes or goes moves its slope little.
    x = torch.arange(SAMPLES, dtype=torch.float64)
    y = torch.tensor(memory, dtype=torch.float64)
    slope = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
    rest = y - y.mean() - slope * (x - x.mean())
    return Growth(float(slope) * SAMPLES, float(rest.abs().max()), last[0] - first[0], last[1] - first[1])


def _live() -> tuple[int, int]:
    """How many objects the garbage collector knows, and how many of them are tensors."""
    gc.collect()
    objects = gc.get_objects()
    return len(objects), sum(isinstance(each, torch.Tensor) for each in objects)


def complaints(found: Growth, unpatched: Growth) -> list[str]:
    """How ``found`` grows beyond what the ``unpatched`` model and its noise explain; empty if it does not."""
    allowed = max(unpatched.bytes, 0.0) + 3 * unpatched.noise + PAGES
    said = []
    if found.bytes > allowed:
        said.append(f"memory grew by {found.bytes / 1024:.0f} KiB, {allowed / 1024:.0f} KiB are noise")
    for name in ("objects", "tensors"):
        more, original = getattr(found, name), getattr(unpatched, name)
        if more > max(original, 0) + FEW:
            said.append(f"{more} more {name}, {original} without us")
    return said


#: The allocator's own grain: a quarter of what one token's worth of a leak would add up to in ROUNDS rounds.
PAGES = 128 * 1024
#: A cache that fills once, late; a leak of one object a generation is ROUNDS.
FEW = ROUNDS // 10
