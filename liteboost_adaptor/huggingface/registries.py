"""Entries of transformers' registries that rules of kind ``registry`` replace."""

from __future__ import annotations

import sys

from ..engine.catalogue import Rule, version_conflict
from ..engine.install import UndoStack
from ..report import report


def install(rules: tuple[Rule, ...], stack: UndoStack) -> None:
    """Put our function into each registry entry a rule names. It serves only modules of bound models."""
    for rule in rules:
        if rule.kind != "registry" or version_conflict(rule):
            continue
        module_name, _, class_name = rule.registry.partition(":")
        mapping = getattr(sys.modules[module_name], class_name)._global_mapping
        replacement = rule.load_replacement()(mapping[rule.entry], report.tally(rule.id), **rule.parameters)
        stack.set_item(mapping, rule.entry, replacement, f"{rule.registry}[{rule.entry!r}]")
