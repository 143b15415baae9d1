"""Which bound models have block-sparse attention of long prompts, and what the status says of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch

from ..config import Settings, turned_off
from ..engine import swap
from ..replacements.attention import REGISTRY
from ..replacements.sparse_attention import CHOICE, RULE
from ..report import APPLIED, DISABLED, IDLE, Listed, Outcome, report

TITLE = "Block-sparse attention of long prompts (LITEBOOST_SPARSE)"
LEVEL = 2

#: What was reported of each model.
_outcomes: weakref.WeakKeyDictionary[torch.nn.Module, list[Outcome]] = weakref.WeakKeyDictionary()


def bind(model: torch.nn.Module, settings: Settings) -> None:
    """Tell the attention modules of a bound ``model`` what its settings ask for, if they do."""
    if settings.sparse is None:
        return
    reason = turned_off(settings, LEVEL, RULE)
    outcomes = []
    for part in model.modules():
        mark = swap.mark_of(part)
        if mark is None or REGISTRY not in mark.registries:
            continue
        if not reason:
            # The class was made for modules under these very settings, and goes when they are taken back.
            setattr(type(part), CHOICE, settings.sparse)
        outcomes.append(Outcome(RULE, DISABLED if reason else APPLIED, type(part).__qualname__, reason))
    for outcome in outcomes:
        report.add(outcome)
    _outcomes[model] = outcomes


def unbind(model: torch.nn.Module) -> None:
    """Take back what was reported of ``model`` and of bound models in it."""
    for part in model.modules():
        for outcome in _outcomes.pop(part, []):
            report.remove(outcome)


def rows(settings: Settings) -> Iterator[Listed]:
    """Its row where somebody asked for it."""
    if settings.sparse is not None or _outcomes:
        reason = turned_off(settings, LEVEL, RULE)
        yield Listed(RULE, TITLE, DISABLED if settings.sparse is None or reason else IDLE, reason)


def asked(model: torch.nn.Module, settings: Settings) -> str:
    """What somebody asked for, as `features` takes it."""
    return "LITEBOOST_SPARSE" if settings.sparse is not None and not turned_off(settings, LEVEL, RULE) else ""
