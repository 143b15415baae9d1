"""How many rows keep, in the kernels of this process, the bits that each has alone: as bound models ask.

Products, attention and experts add up in another order where they have more rows, which is faster for some
numbers of rows; see ``kernels/common/batch_invariant.h``.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator

import torch

from ..config import Settings, turned_off
from ..replacements import latent_attention, paged
from ..report import APPLIED, DISABLED, IDLE, Listed, Outcome, report

RULE = "ops.batch_invariant"
TITLE = "Bits of a row do not depend on the rows beside it (LITEBOOST_BATCH_INVARIANT)"
LEVEL = 1

#: Rows of a batch, or new tokens of a step, that are asked for: all there can be, and where candidates are
#: checked as many as such a step has.
ROWS, SPECULATED_ROWS = 2**40, 16

#: Bound models that asked, by identity, with their rows and what was reported: one that is gone asks no more.
_asked: dict[int, tuple[weakref.ref[torch.nn.Module], int, Outcome]] = {}
_lock = threading.RLock()  # a model may be collected while it is held


def bind(model: torch.nn.Module, settings: Settings) -> None:
    """Have the kernels keep the bits of a bound ``model``'s rows, if its settings ask for that."""
    unbind(model)
    if not _is_asked(settings):
        return
    reason = _turned_off(settings)
    state = DISABLED if reason else APPLIED
    number = "any number of rows"
    if not settings.batch_invariant:
        number = f"up to {SPECULATED_ROWS} rows, in steps that check candidates"
    outcome = Outcome(RULE, state, type(model).__qualname__, reason or number)
    key = id(model)
    with _lock:
        reference = weakref.ref(model, lambda _: _forget(key))
        _asked[key] = reference, ROWS if settings.batch_invariant and not reason else 1, outcome
        _set()
    report.add(outcome)


def unbind(model: torch.nn.Module) -> None:
    """Take back what ``model`` and bound models in it asked for."""
    for part in model.modules():
        if (outcome := _forget(id(part))) is not None:
            report.remove(outcome)


def _forget(key: int) -> Outcome | None:
    """What was reported of a model that asks no more, if it did."""
    with _lock:
        if (asked := _asked.pop(key, None)) is None:
            return None
        _set()
        return asked[-1]


def rows(settings: Settings) -> Iterator[Listed]:
    """Its row where somebody asked for it."""
    if _is_asked(settings) or len(_asked):
        reason = _turned_off(settings)
        yield Listed(RULE, TITLE, DISABLED if reason or not _is_asked(settings) else IDLE, reason)


def asked(model: torch.nn.Module, settings: Settings) -> str:
    """What somebody asked for, as `features` takes it."""
    return "LITEBOOST_BATCH_INVARIANT" if settings.batch_invariant and not _turned_off(settings) else ""


def _is_asked(settings: Settings) -> bool:
    return bool(settings.batch_invariant or settings.speculate)


@contextlib.contextmanager
def checking(settings: Settings) -> Iterator[None]:
    """A step that checks candidates: its rows have, in this thread, the bits that each has alone.

    A text that is speculated is that of plain decoding, so nothing else may change: no prompt, no other call.
    """
    if _turned_off(settings):
        yield
        return
    before = torch.ops.liteboost._set_batch_invariant_rows_here(SPECULATED_ROWS)
    latent_attention.absorb_here(SPECULATED_ROWS)
    try:
        yield
    finally:
        latent_attention.absorb_here(before)
        torch.ops.liteboost._set_batch_invariant_rows_here(before)


def _set() -> None:
    rows = max([1, *(rows for _, rows, _ in _asked.values())])
    is_asked_for = rows > 1
    torch.ops.liteboost._set_batch_invariant_rows(rows, any_length=is_asked_for)
    latent_attention.absorb(rows, prompts=is_asked_for)
    paged.keep_order(is_asked_for)


def _turned_off(settings: Settings) -> str:
    # What speculates is of level 2.
    return turned_off(settings, LEVEL if settings.batch_invariant else 2, RULE)
