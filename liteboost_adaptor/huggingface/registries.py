"""Entries of transformers' registries that rules of kind ``registry`` replace."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from ..engine.catalogue import Rule
from ..engine.guarded import guard
from ..engine.undo_stack import UndoStack
from ..report import report


def install(rules: tuple[Rule, ...], stack: UndoStack) -> None:
    """Put our function into each registry entry a rule names. It serves only modules of bound models.

    Of several rules for one entry the later one is asked first. An entry that somebody else has registered is
    left; see `is_foreign`.
    """
    for rule in rules:
        if rule.kind != "registry" or rule.id in _in_place(rule) or is_foreign(rule):
            continue
        mapping, before = _mapping(rule), _in_place(rule)
        counter, original = report.counter(rule.id), mapping[rule.entry]
        replacement = rule.load_replacement()(original, counter, **rule.parameters)
        entry = guard(rule, replacement, original, counter)
        entry.__liteboost_rules__ = (*before, rule.id)
        stack.set_item(mapping, rule.entry, entry, f"{rule.registry}[{rule.entry!r}]")


def is_foreign(rule: Rule) -> bool:
    """Whether the entry is neither the registry's own nor ours."""
    entry, ours = _mapping(rule).get(rule.entry), _in_place(rule)
    if rule.id in ours or (ours and not hasattr(entry, "__wrapped__")):
        return False
    package = rule.registry.split(".")[0]
    entry = _without_disable(entry)
    return hasattr(entry, "__wrapped__") or (getattr(entry, "__module__", "") or "").split(".")[0] != package


def _without_disable(entry: Any) -> Any:
    """What ``torch.compiler.disable`` has wrapped, or ``entry`` itself."""
    code = getattr(entry, "__code__", None)
    module = sys.modules.get("torch._dynamo.eval_frame")
    is_disabling = code is not None and module is not None and code.co_filename == module.__file__
    return entry.__wrapped__ if is_disabling and hasattr(entry, "__wrapped__") else entry


def _in_place(rule: Rule) -> tuple[str, ...]:
    """The rules that have the entry already, from the first to the last that took it."""
    return getattr(_mapping(rule).get(rule.entry), "__liteboost_rules__", ())


def _mapping(rule: Rule) -> dict[str, Any]:
    module_name, _, class_name = rule.registry.partition(":")
    # Interned, for Python's table of attribute look-ups keeps a name it is asked for.
    return getattr(importlib.import_module(sys.intern(module_name)), sys.intern(class_name))._global_mapping
