"""Every target of one installed transformers with its body and the verdict of the rules.

``python -m liteboost_adaptor.audit.scan PACKAGE FILE`` scans the ``PACKAGE`` that this Python imports and
writes the result to ``FILE``; see `liteboost_adaptor.audit.packages.scan` for how another version gets there.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import json
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .. import native
from ..config import settings
from ..engine import catalogue
from ..engine.catalogue import Rule
from ..engine.fingerprint import DIGEST_LENGTH, Opaque, fingerprint
from ..engine.fit import Fit, Refusal, RuleMatcher
from ..engine.source import tree_of
from ..report import APPLIED, PROVED
from .instances import NotBuilt, build

#: States of a target. Applied, proved and refused are those of a model in use.
LISTED, PROVABLE, UNKNOWN = "listed", "proved", "unknown"
_STATES = {APPLIED: LISTED, PROVED: PROVABLE}


@dataclass(frozen=True)
class Target:
    """A class's method, a function or a registry entry where a rule is expected to fit.

    Attributes:
        name: ``module:Class``, ``module:Class.method`` unless that is forward, ``module:function``,
            ``module:Registry[entry]``.
        digest: Of its body; ``text-`` and a digest of its mere text where it has no fingerprint; or empty.
        state: `LISTED` in the catalogue, `PROVABLE` (not listed, but a probe shows it equal), or `UNKNOWN`.
        rule: Id of the rule that fits, or ``family.*``.
        reason: Why none fits.
    """

    name: str
    digest: str
    state: str
    rule: str
    reason: str = ""


@dataclass(frozen=True)
class Scan:
    """What a package has: its version, targets by name, and modules that could not be imported, with why."""

    version: str
    targets: tuple[Target, ...]
    not_imported: dict[str, str]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Scan:
        values = json.loads(text)
        return cls(values["version"], tuple(Target(**t) for t in values["targets"]), values["not_imported"])


def scan(package: str, rules: tuple[Rule, ...]) -> Scan:
    """Import every modeling module of ``package`` and look at its targets.

    Args:
        package: Name of an importable package.
        rules: The catalogue; rules that ask for another version of something are left out.
    """
    native.load()  # probes run our ops
    root = importlib.import_module(package)
    scanner = _Scanner(tuple(rule for rule in rules if not catalogue.version_conflict(rule)))
    found: dict[str, Target] = {}
    not_imported = {}
    for name in _module_names(root):
        try:
            module = importlib.import_module(name)
        except Exception as fault:  # noqa: BLE001 - a missing optional package, or anything else; reported
            not_imported[name] = f"{type(fault).__name__}: {str(fault).strip().splitlines()[0]}"
            continue
        found.update((target.name, target) for target in scanner.targets(module))
    found.update((target.name, target) for target in scanner.entries(package))
    version = getattr(root, "__version__", "unknown")
    return Scan(version, tuple(found[name] for name in sorted(found)), not_imported)


def _module_names(root: types.ModuleType) -> list[str]:
    """Modeling modules for torch, and the activations they share."""
    folder = Path(root.__file__).parent
    names = []
    for file in sorted(folder.rglob("*.py")):
        is_modeling = file.stem.startswith("modeling_") and not file.stem.startswith(_OTHER_FRAMEWORKS)
        if is_modeling or file == folder / "activations.py":
            names.append(".".join((root.__name__, *file.relative_to(folder).with_suffix("").parts)))
    return names


_OTHER_FRAMEWORKS = ("modeling_tf_", "modeling_flax_")


class _Scanner:
    """Looks at the targets of one module after another, with the rules of one catalogue."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self._rules = rules
        self._matcher = RuleMatcher(rules)

    def targets(self, module: types.ModuleType) -> Iterator[Target]:
        """The targets that ``module`` itself defines."""
        for value in list(vars(module).values()):
            if getattr(value, "__module__", None) != module.__name__:
                continue
            if isinstance(value, type) and issubclass(value, torch.nn.Module):
                yield from self._of_class(value)
            elif type(value) is types.FunctionType:
                yield from self._of_function(value)

    def entries(self, package: str) -> Iterator[Target]:
        """Registry entries that rules replace; ours computes what they computed when they were recorded."""
        for rule in self._rules:
            if rule.kind != "registry" or rule.registry.split(".")[0] != package:
                continue
            name = f"{rule.registry}[{rule.entry}]"
            module_name, _, registry = rule.registry.partition(":")
            try:
                entry = getattr(importlib.import_module(module_name), registry)._global_mapping[rule.entry]
            except (ImportError, AttributeError, KeyError):
                continue  # gone, if the baseline has it
            yield Target(
                name, _digest(entry)[0], UNKNOWN, rule.id, "the entry we replace is another function"
            )

    def _of_class(self, cls: type) -> Iterator[Target]:
        name = f"{cls.__module__}:{cls.__qualname__}"
        for attribute in self._matcher.attributes:
            expected = [
                rule
                for rule in self._rules
                if rule.kind == "module" and rule.attribute == attribute and rule.names(name)
            ]
            if expected and hasattr(cls, attribute):
                yield self._of_method(cls, name, attribute, expected[0].family)
        if cls.__module__.endswith(".activations"):
            # Children of expressions such as ``act(gate) * up``.
            yield self._by_digest(cls, name, "forward", "expression", "mlp")

    def _of_method(self, cls: type, name: str, attribute: str, family: str) -> Target:
        shown = name if attribute == "forward" else f"{name}.{attribute}"
        try:
            instance = build(cls)
        except NotBuilt:
            return self._by_digest(cls, shown, attribute, "module", family)
        digest, _ = _digest(getattr(cls, attribute), cls, instance)
        return _judged(shown, digest, family, self._matcher.method(instance, attribute))

    def _by_digest(self, cls: type, name: str, attribute: str, kind: str, family: str) -> Target:
        """The verdict on a class by its body alone, where there is no instance to ask the engine with."""
        reason, instance = "no rule lists its body", None
        try:
            instance = build(cls)
        except NotBuilt as fault:
            reason += f", and no instance could be made to prove it: {fault}"
        digest, fault = _digest(getattr(cls, attribute), cls, instance)
        for rule in self._rules:
            if rule.kind == kind and rule.attribute == attribute and digest in rule.bodies:
                return Target(name, digest, LISTED, rule.id)
        return Target(name, digest, UNKNOWN, f"{family}.*", fault or reason)

    def _of_function(self, function: types.FunctionType) -> Iterator[Target]:
        name = f"{function.__module__}:{function.__qualname__}"
        expected = [rule for rule in self._rules if rule.kind == "function" and rule.names(name)]
        # Without a fit no rule takes an interest in it, see `Rule.applies`.
        fit = self._matcher.function(function) if expected else None
        if fit is not None:
            yield _judged(name, _digest(function)[0], expected[0].family, fit)


def _judged(name: str, digest: str, family: str, fit: Fit | Refusal | None) -> Target:
    if not isinstance(fit, Fit):
        reason = fit.reason if fit else "no rule takes an interest"
        return Target(name, digest, UNKNOWN, f"{family}.*", reason)
    return Target(name, digest, _STATES[fit.state], fit.rule.id)


def _digest(function: Any, owner: type | None = None, instance: Any = None) -> tuple[str, str]:
    """The fingerprint, else a digest of the mere text, and why it has no fingerprint."""
    try:
        return fingerprint(function, owner, instance).digest, ""
    except Opaque as fault:
        reason = str(fault)
    try:
        text = ast.unparse(tree_of(textwrap.dedent(inspect.getsource(function))))
    except (OSError, TypeError, SyntaxError):
        return "", reason
    return f"text-{hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]}", reason


def _main(package: str, file: str) -> None:
    rules, _ = catalogue.load(settings().patch_path)
    Path(file).write_text(scan(package, rules).to_json(), encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])
