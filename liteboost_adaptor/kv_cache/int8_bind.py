"""Which bound models keep keys and values as integers (kv8), and what the status says of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from ..config import Settings, turned_off
from ..engine import swap
from ..report import APPLIED, DISABLED, IDLE, REFUSED, Listed, Outcome, report
from ..setting_values import INT8
from .int8_layers import RULE, want, want_no_longer

TITLE = "Keys and values of the cache as integers (kv8)"
LEVEL = 2
#: The rule by which modules meet a cache.
_APPENDING = "cache.append"

#: What was reported of each model.
_outcomes: weakref.WeakKeyDictionary[torch.nn.Module, list[Outcome]] = weakref.WeakKeyDictionary()


def bind(model: torch.nn.Module, settings: Settings) -> None:
    """Have caches that modules of a bound ``model`` update keep integers, if it or its settings say so."""
    if not (_is_set(settings) or _is_said_by(model)):
        return
    reason, outcomes = turned_off(settings, LEVEL, RULE, _APPENDING), []
    for part in model.modules():
        mark = swap.mark_of(part)
        if mark is None or not any(outcome.rule == _APPENDING for outcome in mark.outcomes):
            continue
        if not reason:
            want(part)
        outcomes.append(Outcome(RULE, DISABLED if reason else APPLIED, type(part).__qualname__, reason))
    if not outcomes:
        reason = reason or f"no module updates a cache in a way that rule {_APPENDING} knows"
        outcomes.append(Outcome(RULE, REFUSED, type(model).__qualname__, reason))
    for outcome in outcomes:
        report.add(outcome)
    _outcomes[model] = outcomes


def unbind(model: torch.nn.Module) -> None:
    """Take back what was asked of the modules of ``model``, and reported of it and of bound models in it."""
    for part in model.modules():
        want_no_longer(part)
        for outcome in _outcomes.pop(part, []):
            report.remove(outcome)


def rows(settings: Settings) -> Iterator[Listed]:
    """Its row where somebody asked for it."""
    if _is_set(settings) or _outcomes:
        reason = turned_off(settings, LEVEL, RULE, _APPENDING)
        yield Listed(RULE, TITLE, DISABLED if reason else IDLE, reason)


def asked(model: torch.nn.Module, settings: Settings) -> str:
    """What somebody, or the checkpoint, asked for, as `huggingface.features` takes it."""
    is_wanted = _is_set(settings) or _is_said_by(model)
    return "an int8 KV cache (kv8)" if is_wanted and not turned_off(settings, LEVEL, RULE, _APPENDING) else ""


def _is_set(settings: Settings) -> bool:
    return settings.quant is not None and settings.quant.kv_cache == INT8


def _is_said_by(model: torch.nn.Module) -> bool:
    """Whether the checkpoint of ``model`` says so."""
    found: Any = getattr(getattr(model, "config", None), "quantization_config", None)
    said = found.get("kv_cache") if isinstance(found, dict) else getattr(found, "kv_cache", None)
    return said == INT8
