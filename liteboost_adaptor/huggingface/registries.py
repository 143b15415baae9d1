"""Entries of transformers' registries that rules of kind ``registry`` replace."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from ..engine.catalogue import Rule
from ..engine.install import UndoStack
from ..report import report


def install(rules: tuple[Rule, ...], stack: UndoStack) -> None:
    """Put our function into each registry entry a rule names. It serves only modules of bound models.

    An entry that somebody else has registered is left; see `is_foreign`.
    """
    for rule in rules:
        if rule.kind != "registry" or is_foreign(rule):
            continue
        mapping = _mapping(rule)
        replacement = rule.load_replacement()(mapping[rule.entry], report.tally(rule.id), **rule.parameters)
        replacement.__liteboost_rule__ = rule.id
        stack.set_item(mapping, rule.entry, replacement, f"{rule.registry}[{rule.entry!r}]")


def is_foreign(rule: Rule) -> bool:
    """Whether the entry is neither the registry's own nor ours."""
    entry = _mapping(rule).get(rule.entry)
    if getattr(entry, "__liteboost_rule__", None) == rule.id:
        return False
    package = rule.registry.split(".")[0]
    return hasattr(entry, "__wrapped__") or (getattr(entry, "__module__", "") or "").split(".")[0] != package


def _mapping(rule: Rule) -> dict[str, Any]:
    module_name, _, class_name = rule.registry.partition(":")
    # Interned, for Python's table of attribute look-ups keeps a name it is asked for.
    return getattr(importlib.import_module(sys.intern(module_name)), sys.intern(class_name))._global_mapping
