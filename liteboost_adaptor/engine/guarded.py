"""What surrounds every replacement: the original runs where somebody has replaced what it calls.

A replacement knows when its op can serve a call; that nobody has replaced or intercepts what the original
would have called is asked here, for rules of every kind. What takes the replacement's place is what it
stands for: a method or function, or the expression that was rerouted. So does what its op refuses: the
original then raises what it always raised, or does what it always did, but for an index that is out of range.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..errors import LiteBoostError, of_both_types
from ..report import CallCounter
from ..watch import Place, Watch, place_in_class, place_in_module
from . import callees
from .catalogue import Rule

#: Attribute of a replacement that is told why its original has to run (keyword ``liteboost_refusal``) and
#: counts that by itself: where it has more to do than to call the original.
TAKES_REFUSAL = "takes_refusal"
#: Attribute of a replacement of a function: what is called in the place of its original.
PLAIN = "plain"
#: How the checks of ops raise, and the dispatcher's of their schemas; other errors are not caught.
_OF_CHECKS = (ValueError, TypeError, IndexError)
_REFUSALS = (*_OF_CHECKS, RuntimeError)
#: In the dispatcher's error, a RuntimeError, where an argument is of another type than the op's schema says.
_NOT_OF_SCHEMA = "Expected a value of type"
#: ``of_calls`` of a product's replacement: joins it with those of the calls that make its factors, or cannot.
Join = Callable[[Callable[..., Any], Callable[..., Any]], Callable[..., Any] | None]
_is_traced = torch.compiler.is_dynamo_compiling


def guard(
    rule: Rule,
    replacement: Callable[..., Any],
    original: Any,
    counter: CallCounter,
    *,
    owner: type | None = None,
    instance: Any = None,
) -> Callable[..., Any]:
    """``replacement``, which replaces ``original`` by ``rule``, while nobody has replaced what that calls.

    Args:
        owner: The class, where ``original`` is a method of it.
        instance: The module of that class for which it is made.
    """
    if rule.kind == "model" or rule.pattern == "receiver":
        return replacement  # they stand for no computation: what they lead to is guarded
    watch = watch_over([*_places(rule, original, owner, instance), *callees.of_replacement(replacement)])
    if rule.kind == "registry":
        return _guarded_entry(replacement, original, watch, counter)
    if rule.kind == "function":
        return _guarded_function(replacement, original, watch, counter)
    if rule.kind == "module":
        methods = {place.name for place in watch.places if place.space is owner and callable(place.value())}
        return _guarded_method(replacement, original, watch, counter, frozenset(methods - {rule.attribute}))
    guarded = _guarded(replacement, _EXPRESSIONS[rule.pattern], watch, counter)
    if hasattr(replacement, "counter"):
        vars(guarded)["counter"] = replacement.counter
    if hasattr(replacement, "of_calls"):
        vars(guarded)["of_calls"] = _joining(replacement.of_calls, guarded)
    return guarded


def _places(rule: Rule, original: Any, owner: type | None, instance: Any) -> Iterable[Place]:
    """Everything that ``original``, and the expression in which it is called, looks up."""
    if isinstance(original, torch.nn.Module):
        return [*callees.of_call(original), *callees.of_operators(*_OPERATORS.get(rule.pattern, ()))]
    own = [place_in_class(owner, rule.attribute)] if owner is not None else _named(rule, original)
    return [
        *own,
        *callees.of_function(original, owner, instance),
        *callees.of_operators(*_OPERATORS.get(rule.pattern, ())),
    ]


def _named(rule: Rule, function: Any) -> list[Place]:
    """Where a function itself is found.

    Its module's name for it, and the names by which the rule knows it.
    """
    found = []
    names, own_name = getattr(function, "__globals__", {}), getattr(function, "__name__", "")
    if names.get(own_name) is function and rule.kind != "registry":
        found.append(place_in_module(names, own_name))
    for name in rule.functions:
        module, _, attribute = name.partition(":")
        space = vars(__import__(module, fromlist=["_"]))
        if space.get(attribute) is function:
            found.append(place_in_module(space, attribute))
    return found


_watches: weakref.WeakValueDictionary[tuple[Any, ...], Watch] = weakref.WeakValueDictionary()


def watch_over(places: Iterable[Place]) -> Watch:
    """A watch over ``places``; the same one for the same places with the same things in them."""
    places = tuple(dict.fromkeys(places))
    key = tuple((id(place.space), place.name, 0 if place.is_torch else id(place.value())) for place in places)
    found = _watches.get(key)
    if found is None:
        found = _watches[key] = Watch(places)
    return found


def _call(child: Any, x: Any) -> Any:
    return child(x)


def _product(act: Any, gate: Any, up: Any) -> Any:
    return act(gate) * up


def _residual(norm: Any, a: Any, b: Any) -> Any:
    total = a + b
    return norm(total), total


#: The expressions that `rewrite` reroutes, as their authors wrote them, and the operators in them.
_EXPRESSIONS: dict[str, Callable[..., Any]] = {"call": _call, "product": _product, "residual": _residual}
_OPERATORS = {"product": ("mul",), "residual": ("add",)}


def _guarded(
    replacement: Callable[..., Any], plain: Callable[..., Any], watch: Watch, counter: CallCounter | None
) -> Callable[..., Any]:
    """``replacement`` or ``plain``, of arguments by position. Without a counter ``plain`` counts itself."""
    ask = watch.ask

    def guarded(*args: Any) -> Any:
        if _is_traced():
            return replacement(*args)
        reason = ask()
        if not reason:
            try:
                return replacement(*args)
            except _REFUSALS as fault:
                if not _is_refusal(fault):
                    raise
                return _refused(fault, plain, args)
        if counter is not None:
            counter.count_fallback(reason)
        return plain(*args)

    vars(guarded)["watch"] = watch
    return guarded


def _guarded_method(
    replacement: Callable[..., Any],
    original: Callable[..., Any],
    watch: Watch,
    counter: CallCounter,
    methods: frozenset[str],
) -> Callable[..., Any]:
    """A method, whose instance may be given others of the methods that it calls."""
    guarded = _guarded(replacement, original, watch, counter)
    if not methods:
        return guarded

    def guarded_method(self: Any, *args: Any) -> Any:
        if _is_traced() or methods.isdisjoint(self.__dict__):
            return guarded(self, *args)
        counter.count_fallback("the instance has a method of its own")
        return original(self, *args)

    return guarded_method


def _guarded_function(
    replacement: Callable[..., Any], original: Callable[..., Any], watch: Watch, counter: CallCounter
) -> Callable[..., Any]:
    ask, takes_refusal = watch.ask, getattr(replacement, TAKES_REFUSAL, False)
    original = getattr(replacement, PLAIN, original)

    def guarded(*args: Any, **kwargs: Any) -> Any:
        if _is_traced():
            return replacement(*args, **kwargs)
        reason = ask()
        if not reason:
            try:
                return replacement(*args, **kwargs)
            except _REFUSALS as fault:
                if not _is_refusal(fault):
                    raise
                return _refused(fault, original, args, kwargs)
        if takes_refusal:
            return replacement(*args, liteboost_refusal=reason, **kwargs)
        counter.count_fallback(reason)
        return original(*args, **kwargs)

    vars(guarded)["watch"] = watch  # who asks has to keep it
    return guarded


def _guarded_entry(
    replacement: Callable[..., Any], original: Callable[..., Any], watch: Watch, counter: CallCounter
) -> Callable[..., Any]:
    """An entry of a registry: modules of models that are not bound are no matter of ours."""
    guarded = _guarded_function(replacement, original, watch, counter)

    def entry(module: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(module, "__liteboost__", None) is None:
            return original(module, *args, **kwargs)
        return guarded(module, *args, **kwargs)

    setattr(entry, callees.ORIGINAL, original)
    return entry


def _joining(join: Join, guarded: Callable[..., Any]) -> Join:
    """``of_calls`` of a replacement (see `engine.rewrite`), guarded by what all three stand for."""

    def of_calls(left: Callable[..., Any], right: Callable[..., Any]) -> Callable[..., Any] | None:
        joined = join(left, right)
        if joined is None:
            return None
        watches = [each.watch for each in (guarded, left, right) if hasattr(each, "watch")]
        watch = watch_over(place for each in watches for place in each.places)

        def one_by_one(act: Any, gate: Any, up: Any, x: Any) -> Any:
            return guarded(act, left(gate, x), right(up, x))

        return _guarded(joined, one_by_one, watch, None)

    return of_calls


def _is_refusal(fault: Exception) -> bool:
    """Whether the checks of an op, or of its schema, have raised ``fault``."""
    is_of_checks = isinstance(fault, _OF_CHECKS)
    if is_of_checks and isinstance(fault, LiteBoostError):
        return True
    text = str(fault)
    return text.startswith("liteboost") and (is_of_checks or _NOT_OF_SCHEMA in text)


def _refused(
    fault: Exception, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> Any:
    """What the original gives for arguments that an op refuses; where it raises, an error of both types.

    An index that points to nothing stays an error: an original that does not look at it computes with
    memory that is not the caller's, or was never written.
    """
    try:
        result = plain(*args, **(kwargs or {}))
    except Exception as theirs:
        raise of_both_types(fault, theirs) from theirs
    if isinstance(fault, IndexError):
        raise fault
    return result
