"""Bind rules to the modules of one model.

For every module the rules that fit are decided once for its class and the types of its children
(`plan`), and carried out by giving the instance a subclass (`swap`). Nothing outside the model is
touched: no class, no module attribute, no other model.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..report import APPLIED, FAILED, FOREIGN, PROVED, REFUSED, Outcome, report
from . import expressions, source, swap
from . import rewrite as rewriting
from .catalogue import Rule
from .fingerprint import callables, forget
from .fit import Fit, Refusal, RuleMatcher, works_in_place

#: Plans kept. A model has about ten kinds of modules; a plan that was dropped is made again.
_MOST_PLANS = 1000


@dataclass(frozen=True)
class Mark:
    """What a subclass of ours stands for; read by replacements to recognise a bound child.

    Attributes:
        rules: Method name -> rule whose replacement is that method.
        outcomes: What to report for each instance.
        registries: Those (``module:Class``) the module asks for a function, where a rule has an entry.
        calls: Names of the children whose calls are rerouted.
    """

    rules: types.MappingProxyType[str, Rule]
    outcomes: tuple[Outcome, ...]
    registries: frozenset[str] = frozenset()
    calls: frozenset[str] = frozenset()


@dataclass
class BindingPlan:
    """How instances of one class with one kind of children are served. ``subclass`` is None: not at all.

    ``keeps`` holds the objects whose identities are in the plan's key, so that no other gets their address.
    """

    subclass: type | None
    outcomes: tuple[Outcome, ...]
    keeps: tuple[Any, ...] = ()


@dataclass
class Binding:
    """What was done to one model, and how to take it back."""

    model: weakref.ref[torch.nn.Module]
    modules: list[weakref.ref[torch.nn.Module]] = field(default_factory=list)
    refusals: list[Outcome] = field(default_factory=list)
    #: Found out where it matters (`parallel.sequence`), and true for as long as the model is bound so.
    mixes_in_attention_only: bool = False

    def undo(self) -> list[str]:
        """Give every module its own class back. Returns a sentence for each that someone else has changed."""
        left = []
        for reference in reversed(self.modules):
            module = reference()
            if module is None:
                continue
            left += restore(module)
        for outcome in self.refusals:
            report.remove(outcome)
        self.modules.clear()
        self.refusals.clear()
        return left


def restore(module: torch.nn.Module) -> list[str]:
    """Give one module its own class back. Returns a sentence when someone has changed it since."""
    mark = swap.mark_of(module) or swap.mark_beneath(module)
    if swap.restore(module):
        for outcome in mark.outcomes:
            report.remove(outcome)
        return []
    if swap.is_below_ours(module):
        return [f"{type(module).__qualname__} was changed by someone else since; theirs is left"]
    return []


class Binder:
    """Binds the rules of one catalogue; keeps the plans it made.

    Args:
        rules: Those that may act.
        always: Classes whose instances are marked whether or not a rule fits.
    """

    def __init__(
        self,
        rules: tuple[Rule, ...],
        always: Callable[[type], bool] = lambda cls: False,
    ) -> None:
        self.rules = rules
        self.always = always
        self.matcher = RuleMatcher(rules)
        self._plans: dict[Any, BindingPlan] = {}
        self._of_torch = 0
        #: By class, of the binding that is under way: see `_reached_and_named`.
        self._named: dict[type, tuple[dict[str, Any], tuple[Any, ...]]] = {}
        self._lock = threading.RLock()

    def bind(self, model: torch.nn.Module, parts: Collection[torch.nn.Module] | None = None) -> Binding:
        """Serve every module of ``model``, or those in ``parts``, that a rule fits.

        A fault becomes a *failed* outcome.
        """
        binding = Binding(weakref.ref(model))
        with self._lock:
            forget()
            self._named.clear()  # also of a binding that was interrupted
            self._of_torch = _functions_of_torch()
            # Children first: a parent's routes depend on what its children became.
            for module in reversed(list(model.modules())):
                if swap.mark_of(module) is None and (parts is None or module in parts):
                    swap.shed_leftover(module)
                    self._bind_module(module, binding)
            self._named.clear()
        return binding

    def _bind_module(self, module: torch.nn.Module, binding: Binding) -> None:
        try:
            plan = self._plan(module)
            if plan.subclass is not None:
                swap.swap(module, plan.subclass)
        except Exception as fault:  # noqa: BLE001 - recorded; the original runs
            outcome = Outcome("engine", FAILED, _target(type(module)), f"{type(fault).__name__}: {fault}")
            plan = BindingPlan(None, (outcome,))
        for outcome in plan.outcomes:
            report.add(outcome)
            if outcome.state not in (APPLIED, PROVED):
                binding.refusals.append(outcome)
        if plan.subclass is not None:
            binding.modules.append(weakref.ref(module))

    def _plan(self, module: torch.nn.Module) -> BindingPlan:
        cls = type(module)
        if cls.__module__.split(".")[0] == "torch" and not self.matcher.names_class(_target(cls)):
            return BindingPlan(None, ())
        if cls not in self._named:
            self._named[cls] = self._reached_and_named(cls)
        reached, names = self._named[cls]
        key = (
            cls,
            self._of_torch,
            swap.hides_forward(module),
            self._children(module),
            self.matcher.instance_key(module),
            tuple(map(id, reached.values())),
            tuple(map(id, names)),
        )
        if key not in self._plans:
            self._plans[key] = _BindingPlanner(self, module, reached).plan()
            forwards = [getattr(type(child), "forward", None) for child in module._modules.values()]
            self._plans[key].keeps = (tuple(reached.values()), names, forwards)
            if len(self._plans) > _MOST_PLANS:  # classes made in a notebook or a test come and go
                del self._plans[next(iter(self._plans))]
        return self._plans[key]

    def _reached_and_named(self, cls: type[torch.nn.Module]) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """What the methods are, what they name and what that names: it may be another at the next binding."""
        reached = _reached(cls, self.matcher.registries)
        named = [value for method in reached.values() for value in _named_functions(method)]
        return reached, (*named, *(value for function in named for value in _named_functions(function)))

    def _children(self, module: torch.nn.Module) -> tuple[tuple[Any, ...], ...]:
        # What a child holds and calls is part of what it computes; the class of a bound one says it.
        return tuple(
            (
                name,
                type(child),
                id(getattr(type(child), "forward", None)),
                works_in_place(child),
                () if swap.mark_of(child) else callables(child),
            )
            for name, child in module._modules.items()
            if child is not None
        )


def _functions_of_torch() -> int:
    """Another one whenever somebody has replaced a function of torch: originals may name it."""
    spaces = (torch, torch.nn.functional)
    functions = (id(value) for space in spaces for value in vars(space).values() if callable(value))
    return hash(tuple(functions))


def _current_forward(cls: type[torch.nn.Module]) -> Callable[..., Any]:
    """The forward that ``cls`` has when it is called: somebody may put another there after us."""

    @functools.wraps(cls.forward)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return cls.forward(self, *args, **kwargs)

    return forward


class _BindingPlanner:
    """Decides the plan for one module."""

    def __init__(self, binder: Binder, module: torch.nn.Module, reached: Mapping[str, Any]) -> None:
        self.rules, self.matcher = binder.rules, binder.matcher
        self.is_marked_anyway = binder.always(type(module))
        self.module, self.cls = module, type(module)
        self.target = _target(self.cls)
        self.reached = reached
        self.outcomes: list[Outcome] = []
        self.methods: dict[str, Any] = {}
        self.bound: dict[str, Rule] = {}
        self.calls: set[str] = set()

    def plan(self) -> BindingPlan:
        for attribute in self.matcher.attributes:
            self._replace_method(attribute)
        for attribute, method in self.reached.items():
            if attribute not in self.methods:
                self._reroute(attribute, method)
        self._wrap_methods()
        registries = self._asks_registry()
        self.outcomes = list(dict.fromkeys(self.outcomes))  # one child may be met in several methods
        bound = [outcome for outcome in self.outcomes if outcome.state in (APPLIED, PROVED)]
        if bound and swap.hides_forward(self.module):
            reason = "this instance has a forward of its own (a hook of another library)"
            return BindingPlan(None, tuple(Outcome(o.rule, FOREIGN, o.target, reason) for o in bound))
        if not bound and not self.is_marked_anyway:
            return BindingPlan(None, tuple(self.outcomes))
        mark = Mark(types.MappingProxyType(dict(self.bound)), tuple(bound), registries, frozenset(self.calls))
        return BindingPlan(self._subclass(mark), tuple(self.outcomes))

    def _subclass(self, mark: Mark) -> type:
        return swap.subclass(self.cls, self.methods, mark)

    def _replace_method(self, attribute: str) -> None:
        """A whole method that a rule of kind ``module`` replaces."""
        method = getattr(self.cls, attribute, None)
        if method is None:
            return
        fit = self.matcher.method(self.module, attribute)
        if fit is None:
            return
        if isinstance(fit, Refusal):
            self.outcomes.append(Outcome(fit.family, fit.state, self.target, fit.reason))
            return
        replacement = self._make(fit, method, self.cls)
        if replacement is None:
            return
        try:
            self.methods[attribute] = rewriting.forwarding(method, replacement, self.cls, attribute)
        except source.SourceUnavailable as fault:
            self.outcomes.append(Outcome(fit.rule.id, REFUSED, self.target, f"{attribute} {fault}"))
            return
        self.bound[attribute] = fit.rule
        self.outcomes.append(Outcome(fit.rule.id, fit.state, self.target))

    def _wrap_methods(self) -> None:
        """What rules of kind ``model`` put around methods, the forward after all others have changed it."""
        if not self.is_marked_anyway:
            return
        for fit in self.matcher.model(self.cls):
            name = fit.rule.attribute
            current = _current_forward(self.cls) if name == "forward" else getattr(self.cls, name)
            wrapper = self._make(fit, self.methods.get(name) or current)
            if wrapper is not None:
                self.methods[name] = wrapper
                self.outcomes.append(Outcome(fit.rule.id, fit.state, self.target))

    def _make(self, fit: Fit, original: Any, owner: type | None = None) -> Callable[..., Any] | None:
        """The rule's replacement; a factory that raises costs this rule and no other."""
        try:
            return fit.make(original, owner, self.module)
        except Exception as fault:  # noqa: BLE001 - recorded; the original runs
            reason = f"{type(fault).__name__}: {fault}"
            self.outcomes.append(Outcome(fit.rule.id, FAILED, self.target, reason))
            return None

    def _asks_registry(self) -> frozenset[str]:
        """The registries that the module's methods ask and a rule has an entry for."""
        asked = [rule for rule in self.matcher.registries if _asks(self.reached.values(), rule)]
        self.outcomes += [Outcome(rule.id, APPLIED, self.target) for rule in asked]
        return frozenset(rule.registry for rule in asked)

    def _reroute(self, attribute: str, method: Any) -> None:
        """Expressions inside a method, by the rules of kinds ``expression`` and ``function``."""
        routes = rewriting.Routes()
        owners: dict[tuple[str, str], Fit] = {}
        for name, child in self.module._modules.items():
            for fit in self.matcher.expressions(child) if child is not None else ():
                replacement = self._make(fit, child)
                if replacement is not None:
                    getattr(routes, fit.rule.pattern)[name] = replacement
                    owners[(fit.rule.pattern, name)] = fit
        self._route_functions(method, routes, owners)
        self._route_factors(method, routes, owners)
        self._route_receivers(method, routes, owners)
        if not owners:
            return
        if _is_wrapped_by_others(method):
            for rule in sorted({fit.rule.id for fit in owners.values()}):
                reason = f"{attribute} is wrapped by another library; theirs is left"
                self.outcomes.append(Outcome(rule, FOREIGN, self.target, reason))
            return
        try:
            rewritten = rewriting.rewrite(method, routes, self.cls, attribute)
        except source.SourceUnavailable as fault:
            for fit in {id(fit): fit for fit in owners.values()}.values():
                self.outcomes.append(Outcome(fit.rule.id, REFUSED, self.target, f"{attribute} {fault}"))
            return
        if rewritten is None:
            return
        self.methods[attribute] = rewritten.function
        self.calls |= rewritten.met.get("call", set())
        for pattern, names in rewritten.met.items():
            for name in sorted(names):
                fit = owners[(pattern, name)]
                self.outcomes.append(Outcome(fit.rule.id, fit.state, f"{self.target}: {name}"))

    def _route_functions(
        self, method: Any, routes: rewriting.Routes, owners: dict[tuple[str, str], Fit]
    ) -> None:
        try:
            inner = source.innermost(method)
        except source.SourceUnavailable:
            return
        for name in inner.__code__.co_names:
            function = inner.__globals__.get(name)
            fit = (
                self.matcher.function(function)
                if callable(function) and not isinstance(function, type)
                else None
            )
            if fit is None:
                continue
            if isinstance(fit, Refusal):
                self.outcomes.append(Outcome(fit.family, fit.state, f"{self.target}: {name}", fit.reason))
                continue
            replacement = self._make(fit, function)
            if replacement is not None:
                routes.function[name] = (function, replacement)
                owners[("function", name)] = fit

    def _route_receivers(
        self, method: Any, routes: rewriting.Routes, owners: dict[tuple[str, str], Fit]
    ) -> None:
        """Calls of a method of what was handed in, such as ``past_key_values.update(...)``."""
        try:
            names = source.innermost(method).__code__.co_names
        except source.SourceUnavailable:
            return
        for rule in self.matcher.receivers:
            if rule.attribute not in names:
                continue
            fit = Fit(rule)
            replacement = self._make(fit, None)
            if replacement is not None:
                routes.receiver[rule.attribute] = replacement
                owners[("receiver", rule.attribute)] = fit

    def _route_factors(
        self, method: Any, routes: rewriting.Routes, owners: dict[tuple[str, str], Fit]
    ) -> None:
        """Products with the result of a function, such as ``F.silu(a) * b``."""
        try:
            inner = source.innermost(method)
            if self.matcher.factor_names.isdisjoint(inner.__code__.co_names):
                return
            node = source.parse(inner).node
        except source.SourceUnavailable:
            return
        for text in expressions.callees_in_products(node, inner.__code__.co_varnames):
            function = expressions.resolve(text, inner.__globals__)
            fit = self.matcher.factor(function)
            if fit is None:
                continue
            replacement = self._make(fit, function)
            if replacement is not None:
                routes.factor[text] = replacement
                owners[("factor", text)] = fit


def _target(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _reached(cls: type, registries: Iterable[Rule]) -> dict[str, Any]:
    """``forward``, the methods of the same class it calls, and those that entries of ``registries`` read.

    By name, in order of discovery.
    """
    found = _called(cls, ["forward"], {})
    for rule in registries:
        if rule.reads and _asks(found.values(), rule):
            found = _called(cls, list(rule.reads), found)
    return found


def _called(cls: type, pending: list[str], found: dict[str, Any]) -> dict[str, Any]:
    """``found``, the methods of ``cls`` called ``pending``, and the methods of the same class these call."""
    found = dict(found)
    while pending:
        name = pending.pop(0)
        method = getattr(cls, name, None)
        if name in found or method is None:
            continue
        found[name] = method
        try:
            called = source.innermost(method).__code__.co_names
        except source.SourceUnavailable:
            continue
        own = vars(cls)
        pending += [n for n in called if type(own.get(n)) is types.FunctionType and not n.startswith("__")]
    return found


def _asks(methods: Iterable[Any], rule: Rule) -> bool:
    """Whether one of ``methods``, or a decorator of it, names or holds an object of the rule's registry."""
    return any(
        _target(type(value)) == rule.registry
        for method in methods
        for value in (*_named_globals(method), *_held_by_wrappers(method))
    )


def _held_by_wrappers(method: Any) -> list[Any]:
    """What the functions around a method hold in their closures, or name as a global."""
    try:
        chain = source.wrapper_chain(method)
    except source.SourceUnavailable:
        return []
    cells = [rewriting.contents(cell) for wrapper in chain for cell in wrapper.__closure__ or ()]
    return cells + [value for wrapper in chain for value in _globals_of(wrapper)]


def _named_globals(method: Any) -> list[Any]:
    """Values of the global names a method uses."""
    try:
        return _globals_of(source.innermost(method))
    except source.SourceUnavailable:
        return []


def _globals_of(function: Any) -> list[Any]:
    names = function.__globals__
    return [names[name] for name in function.__code__.co_names if name in names]


def _named_functions(method: Any) -> list[Any]:
    """Those of `_named_globals` that can be called and are no classes."""
    return [value for value in _named_globals(method) if callable(value) and not isinstance(value, type)]


def _is_wrapped_by_others(method: Any) -> bool:
    """Whether a wrapper around ``method`` comes from a package that neither wrote nor carries it.

    Decorators in the text of a method belong to its author; torch's and transformers' own are known.
    """
    try:
        inner, chain = source.innermost(method), source.wrapper_chain(method)
    except source.SourceUnavailable:
        return True
    known = {"torch", "transformers", inner.__globals__.get("__name__", "").split(".")[0]}
    return any(wrapper.__globals__.get("__name__", "").split(".")[0] not in known for wrapper in chain)
