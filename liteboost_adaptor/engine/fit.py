"""Which rule, if any, a method, function or child module fits; and why not."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CatalogueError
from ..report import APPLIED, FAILED, FOREIGN, PROVED, REFUSED, CallCounter, Outcome, report
from . import swap
from .catalogue import Rule, resolve
from .fingerprint import Fingerprint, Opaque, behind_wrapper, callables, fingerprint
from .guarded import guard
from .probe import probe


@dataclass(frozen=True)
class Fit:
    """A rule that may be bound to one target.

    Attributes:
        state: `APPLIED`, or `PROVED` where a probe says so.
        parameters: For its replacement, beside the rule's own.
    """

    rule: Rule
    state: str = APPLIED
    parameters: tuple[tuple[str, Any], ...] = ()

    def make(self, original: Any, owner: type | None = None, instance: Any = None) -> Callable[..., Any]:
        """The replacement for ``original``, guarded, counting into the rule's counter.

        ``owner`` and ``instance``: where ``original`` is a method of a class, that class and a module of it.
        """
        counter, parameters = report.counter(self.rule.id), {**self.rule.parameters, **dict(self.parameters)}
        replacement = self.rule.load_replacement()(original, counter, **parameters)
        return guard(self.rule, replacement, original, counter, owner=owner, instance=instance)


@dataclass(frozen=True)
class Refusal:
    """A family none of whose rules may be bound to a target that looks like one of it.

    Attributes:
        state: `REFUSED` or `FOREIGN`.
    """

    family: str
    state: str
    reason: str


class RuleMatcher:
    """Fits of one catalogue; probes are run once for a digest."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self._methods = [rule for rule in rules if rule.kind == "module"]
        self._functions = [rule for rule in rules if rule.kind == "function"]
        self._expressions = [rule for rule in rules if rule.kind == "expression"]
        self.receivers = [rule for rule in self._expressions if rule.pattern == "receiver"]
        self._factors = _functions_that_resolve(self._expressions)
        self.factor_names = frozenset(name.rpartition(":")[2] for name in self._factors)
        self.registries = [rule for rule in rules if rule.kind == "registry"]
        self._models = [rule for rule in rules if rule.kind == "model"]
        self._verdicts: dict[Any, str] = {}
        self.attributes = tuple(dict.fromkeys(rule.attribute for rule in self._methods))
        self._reads = frozenset(name for rule in self._methods for name in rule.reads)

    def names_class(self, target: str) -> bool:
        """Whether a rule expects this class; asked for torch's own, which are left alone otherwise."""
        return any(rule.names(target) for rule in self._methods)

    def instance_key(self, module: torch.nn.Module) -> Any:
        """What of an instance, beyond its class, can change a verdict."""
        shapes = tuple((name, tuple(p.shape)) for name, p in module._parameters.items() if p is not None)
        return callables(module), _present(module, self._reads), shapes[:2]

    def method(self, module: torch.nn.Module, attribute: str) -> Fit | Refusal | None:
        """Fit of a method of ``module``; ``None`` when it neither fits nor was expected to."""
        cls = type(module)
        rules = [rule for rule in self._methods if rule.attribute == attribute]
        target = f"{cls.__module__}:{cls.__qualname__}"
        method = getattr(cls, attribute)

        def probe_with(rule: Rule) -> str:
            cases = functools.partial(rule.load_probe(), module)
            return self._probe(rule, method, cases)

        return _decide(
            rules,
            target,
            identify=lambda: fingerprint(method, cls, module),
            missing=lambda rule: "".join(
                f"has no attribute {name}; " for name in rule.reads if not hasattr(module, name)
            ),
            probe_with=probe_with,
            verdicts=self._verdicts,
            instance_key=self.instance_key(module),
        )

    def model(self, cls: type) -> list[Fit]:
        """Fits of the rules around methods of a whole model."""
        return [Fit(rule) for rule in self._models if rule.load_applies()(cls)]

    def function(self, function: Any) -> Fit | Refusal | None:
        """Fit of a function some method calls by name."""
        target = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '')}"
        rules, body = [rule for rule in self._functions if _applies(rule, function)], function
        inner, wrapper = behind_wrapper(function)
        if any(wrapper in rule.wrappers for rule in rules):
            rules, body = [rule for rule in rules if wrapper in rule.wrappers], inner
        return _decide(
            rules,
            target,
            identify=lambda: fingerprint(body),
            missing=lambda rule: "",
            probe_with=lambda rule: self._probe(rule, function, rule.load_probe()),
            verdicts=self._verdicts,
            instance_key=None,
        )

    def factor(self, function: Any) -> Fit | None:
        """Fit of a function whose call is a factor of a product."""
        # What has the name now: somebody may have exchanged it since, or put it back.
        for name, rule in self._factors.items():
            if resolve(name, rule) is function:
                return Fit(rule)
        return None

    def expressions(self, child: torch.nn.Module) -> list[Fit]:
        """Fits of the expression rules whose child this is, at most one for a pattern."""
        found: dict[str, Fit] = {}
        for rule in self._expressions:
            fit = self._expression(rule, child)
            if fit is not None:
                found.setdefault(rule.pattern, fit)
        return list(found.values())

    def _expression(self, rule: Rule, child: torch.nn.Module) -> Fit | None:
        cls = swap.original_class(child)
        if works_in_place(child):
            return None
        if rule.child_rules:
            mark = swap.mark_of(child)
            bound = mark.rules.get("forward") if mark is not None else None
            if bound is None or bound.id not in rule.child_rules:
                return None
            parameters = tuple((name, bound.parameters[name]) for name in sorted(bound.parameters))
            return Fit(rule, parameters=(*parameters, ("child_rule", bound.id)))
        if f"{cls.__module__}:{cls.__qualname__}" in rule.children:
            return Fit(rule)
        forward = getattr(cls, "forward", None)
        if rule.bodies and type(forward) is types.FunctionType:
            try:
                digest = fingerprint(forward, cls, child).digest
            except Opaque:
                return None
            return Fit(rule) if digest in rule.bodies else None
        return None

    def _probe(self, rule: Rule, original: Any, cases: Any) -> str:
        @functools.wraps(original)
        def never(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("the replacement does not serve this input")

        replacement = rule.load_replacement()(never, CallCounter(), **rule.parameters)
        return probe(original, replacement, cases, rule.rounding == "same")


def _present(module: torch.nn.Module, names: frozenset[str]) -> tuple[str, ...]:
    """Those of ``names`` that ``module`` has; most have none, which torch takes long to say."""
    cls, own = type(module), vars(module)
    if cls.__getattr__ is not torch.nn.Module.__getattr__:
        return tuple(sorted(name for name in names if hasattr(module, name)))
    held = (own, own["_parameters"], own["_buffers"], own["_modules"], *map(vars, cls.__mro__))
    asked = set().union(*(names & each.keys() for each in held))
    return tuple(sorted(name for name in asked if hasattr(module, name)))


def _functions_that_resolve(rules: list[Rule]) -> dict[str, Rule]:
    """Name of a function -> rule; a name that does not resolve costs that name, and is listed."""
    found: dict[str, Rule] = {}
    for rule in rules:
        for name in rule.functions:
            try:
                resolve(name, rule)
                found.setdefault(name, rule)
            except CatalogueError as fault:
                report.add(Outcome(rule.id, FAILED, name, str(fault)))
    return found


def _applies(rule: Rule, function: Any) -> bool:
    return not rule.applies or (type(function) is types.FunctionType and rule.load_applies()(function))


def works_in_place(child: torch.nn.Module) -> bool:
    """Whether calling ``child`` changes its input, as ``nn.SiLU(inplace=True)`` does; ours never do."""
    return bool(getattr(child, "inplace", False))


def _decide(
    rules: list[Rule],
    target: str,
    *,
    identify: Callable[[], Fingerprint],
    missing: Callable[[Rule], str],
    probe_with: Callable[[Rule], str],
    verdicts: dict[Any, str],
    instance_key: Any,
) -> Fit | Refusal | None:
    """Listed body, else operations and probe, else a refusal if the target looks like one.

    Args:
        identify: Takes the fingerprint, or raises `Opaque`.
        missing: Which attributes a rule reads and the instance lacks, or ``""``.
        probe_with: Why a probe of a rule refuses, or ``""``.
        verdicts: Of probes so far, by rule, digest and instance; filled here.
        instance_key: What of the instance can change them.
    """
    expected = [rule for rule in rules if rule.names(target)]
    if not rules:
        return None
    try:
        found = identify()
    except Opaque as fault:
        if not expected:
            return None
        state = FOREIGN if "wrapped" in str(fault) or "not a plain function" in str(fault) else REFUSED
        return Refusal(f"{expected[0].family}.*", state, str(fault))
    listed = [rule for rule in rules if found.digest in rule.bodies]
    for rule in listed:
        if not missing(rule):
            return Fit(rule)
    reasons = [f"{rule.id}: {missing(rule)}".rstrip("; ") for rule in listed]
    candidates = [
        rule for rule in rules if rule.probe and (rule in expected or set(rule.needs) <= found.operations)
    ]
    for rule in candidates:
        if not rule.operations or (rule not in expected and not rule.needs):
            continue
        foreign = sorted(found.operations - set(rule.operations) - {f"self.{name}" for name in rule.reads})
        if foreign:
            reasons.append(f"{rule.id}: uses {', '.join(foreign)}, which its family does not")
            continue
        if missing(rule):
            reasons.append(f"{rule.id}: {missing(rule)}".rstrip("; "))
            continue
        key = (rule.id, found.digest, instance_key)
        if key not in verdicts:
            try:
                verdicts[key] = probe_with(rule)
            except Exception as fault:  # noqa: BLE001 - a replacement that raises is no proof
                verdicts[key] = f"its probe raised {type(fault).__name__}: {fault}"
        if not verdicts[key]:
            return Fit(rule, PROVED)
        reasons.append(f"{rule.id}: {verdicts[key]}")
    if not expected:
        return None
    why = "; ".join(dict.fromkeys(reasons)) or "no rule of the family knows such a body"
    return Refusal(f"{expected[0].family}.*", REFUSED, f"body {found.digest} is not in the catalogue; {why}")
