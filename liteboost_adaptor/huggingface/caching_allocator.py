"""Freed memory of large tensors is kept for the next ones, as long as a model on the CPU is bound.

The system clears new memory page by page as it is first used, and takes it back with the tensor: for the
activations of a prompt that takes up to a quarter of the time. See ``kernels/common/caching_allocator.h``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import torch

from ..config import Settings, turned_off
from ..engine import swap
from ..memory import available_bytes
from ..report import APPLIED, DISABLED, IDLE, Listed, Outcome, report

RULE = "memory.caching_allocator"
TITLE = "Freed memory of large tensors is used again"
LEVEL = 2

#: Bytes that are kept while they are free, at most; and which part of the memory that there is.
MOST, PART = 1 << 30, 16

#: Bound models that ask for it, which are known by identity, and what was reported of each.
_asked: dict[int, tuple[weakref.ref[torch.nn.Module], Outcome]] = {}
_lock = threading.RLock()  # a model may be collected while it is held


def bind(model: torch.nn.Module, settings: Settings) -> None:
    """Have torch keep freed memory while the bound ``model``, if it computes on the CPU, is alive."""
    unbind(model)
    if turned_off(settings, LEVEL, RULE) or not _computes_here(model):
        return
    most = min(MOST, available_bytes() // PART)
    with _lock:
        is_served = bool(_asked) or torch.ops.liteboost._set_caching_allocator(most)
        reason = "" if is_served else "somebody else has set an allocator of torch's since"
        outcome = Outcome(RULE, APPLIED if is_served else IDLE, type(model).__qualname__, reason)
        if is_served:
            key = id(model)
            _asked[key] = weakref.ref(model, lambda _: _forget(key)), outcome
    report.add(outcome)


def unbind(model: torch.nn.Module) -> None:
    """Take back what ``model`` and bound models in it asked for."""
    for part in model.modules():
        if (outcome := _forget(id(part))) is not None:
            report.remove(outcome)


def rows(settings: Settings) -> Iterator[Listed]:
    """Its row."""
    reason = turned_off(settings, LEVEL, RULE)
    yield Listed(RULE, TITLE, DISABLED if reason else IDLE, reason)


def is_deleter(deleter: int) -> bool:
    """Whether memory that is freed by ``deleter``, as ``_deleter_of`` gives it, is from here."""
    return deleter != 0 and deleter == torch.ops.liteboost._caching_allocator_deleter()


def _computes_here(model: torch.nn.Module) -> bool:
    """Whether some of ``model`` is served, and some of it on the CPU."""
    is_served = any(swap.mark_of(part) is not None for part in model.modules())
    return is_served and any(weight.is_cpu for weight in model.parameters())


def _forget(key: int) -> Outcome | None:
    """What was reported of a model that asks no more."""
    with _lock:
        _, outcome = _asked.pop(key, (None, None))
        if outcome is not None and not _asked:
            torch.ops.liteboost._set_caching_allocator(0)
    return outcome
