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

#: Bound models that ask for it, by identity: the last one that is collected ends it.
_asked: dict[int, weakref.ref[torch.nn.Module]] = {}
_outcomes: weakref.WeakKeyDictionary[torch.nn.Module, Outcome] = weakref.WeakKeyDictionary()
_lock = threading.RLock()  # a model may be collected while it is held


def bind(model: torch.nn.Module, settings: Settings) -> None:
    """Have torch keep freed memory while the bound ``model``, if it computes on the CPU, is alive."""
    unbind(model)
    if turned_off(settings, LEVEL, RULE) or not _computes_here(model):
        return
    most = max(0, min(MOST, available_bytes() // PART))  # below zero behind a limit that was set too late
    with _lock:
        reason = "" if _asked else _why_not(most)
        if not reason:
            key = id(model)
            _asked[key] = weakref.ref(model, lambda _: _forget(key))
    outcome = Outcome(RULE, IDLE if reason else APPLIED, type(model).__qualname__, reason)
    report.add(outcome)
    _outcomes[model] = outcome


def unbind(model: torch.nn.Module) -> None:
    """Take back what ``model`` and bound models in it asked for."""
    for part in model.modules():
        _forget(id(part))
        if (outcome := _outcomes.pop(part, None)) is not None:
            report.remove(outcome)


def rows(settings: Settings) -> Iterator[Listed]:
    """Its row."""
    reason = turned_off(settings, LEVEL, RULE)
    yield Listed(RULE, TITLE, DISABLED if reason else IDLE, reason)


def is_deleter(deleter: int) -> bool:
    """Whether memory that is freed by ``deleter``, as ``_deleter_of`` gives it, is from here."""
    return deleter != 0 and deleter == torch.ops.liteboost._caching_allocator_deleter()


def _why_not(most: int) -> str:
    """Why up to ``most`` bytes are not kept from now on, or an empty string."""
    if most == 0:
        return "memory is short"
    is_set = torch.ops.liteboost._set_caching_allocator(most)
    return "" if is_set else "somebody else has set an allocator of torch's since"


def _computes_here(model: torch.nn.Module) -> bool:
    """Whether some of ``model`` is served, and some of it on the CPU."""
    is_served = any(swap.mark_of(part) is not None for part in model.modules())
    return is_served and any(weight.is_cpu for weight in model.parameters())


def _forget(key: int) -> None:
    with _lock:
        if _asked.pop(key, None) is not None and not _asked:
            torch.ops.liteboost._set_caching_allocator(0)
