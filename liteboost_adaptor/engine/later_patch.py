"""A method that somebody has put on a class after us is called as if our subclass did not override it."""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import source

_CLASS, _ORIGINAL = "__liteboost_class__", "__liteboost_original__"
_CALL_LATER_PATCH, _PARAMETERS = "__liteboost_call_later_patch__", "__liteboost_parameters__"


def yield_to_later_patch(
    node: ast.FunctionDef, method: Any, owner: type | None, attribute: str
) -> dict[str, Any]:
    """Begin ``node`` with a check that ``owner`` still has ``method``; returns the names the check uses.

    ``attribute`` is what ``owner`` calls the method, where that is not the name in its definition.

    A patch that someone puts on the class after us must act, though our subclass overrides the method; and so
    must other code that someone gives the very function.
    """
    if owner is None:
        return {}
    names = {
        _CLASS: owner,
        _ORIGINAL: method,
        _CALL_LATER_PATCH: call_later_patch,
        _PARAMETERS: _parameters(method),
    }
    current = ast.Attribute(value=load(_CLASS), attr=attribute or node.name, ctx=ast.Load())
    tests: list[ast.expr] = [ast.Compare(left=current, ops=[ast.IsNot()], comparators=[load(_ORIGINAL)])]
    tests += _code_exchanged(method, names)
    later = call_with(node.args, _CALL_LATER_PATCH)
    later.args = [copy.copy(current), load(_PARAMETERS), *later.args]
    changed = ast.BoolOp(op=ast.Or(), values=tests)
    check = ast.If(test=changed, body=[ast.Return(value=later)], orelse=[])
    has_docstring = ast.get_docstring(node, clean=False) is not None
    node.body = [*node.body[:has_docstring], ast.copy_location(check, node), *node.body[has_docstring:]]
    return names


def _code_exchanged(method: Any, names: dict[str, Any]) -> list[ast.expr]:
    """Whether ``method``, or a function it wraps, has other code than now; ``names``: what is compared."""
    tests: list[ast.expr] = []
    for n, function in enumerate((*source.wrapper_chain(method), source.innermost(method))):
        names |= {f"__liteboost_function_{n}__": function, f"__liteboost_code_{n}__": function.__code__}
        found = ast.Attribute(value=load(f"__liteboost_function_{n}__"), attr="__code__", ctx=ast.Load())
        tests.append(
            ast.Compare(left=found, ops=[ast.IsNot()], comparators=[load(f"__liteboost_code_{n}__")])
        )
    return tests


class Parameters(NamedTuple):
    """What a method takes by position.

    Attributes:
        names: In their order.
        defaults: Of the last of them.
    """

    names: tuple[str, ...]
    defaults: tuple[Any, ...]


def _parameters(method: Any) -> Parameters:
    function = source.innermost(method)
    code = function.__code__
    return Parameters(code.co_varnames[: code.co_argcount], function.__defaults__ or ())


def call_later_patch(later: Callable[..., Any], parameters: Parameters, *args: Any, **kwargs: Any) -> Any:
    """Call ``later`` with what a method of these ``parameters`` was given: ``args`` has all of them.

    Which of them were given by name, and which not at all, nobody knows any more. By convention what has a
    default is given by name; what is the default, and ``later`` has no place for, was not given.
    """
    is_longer = len(args) > len(parameters.names)
    taken, takes_names = (None, False) if torch.compiler.is_compiling() else _names_taken(later)
    if taken is None or is_longer:
        return later(*args, **kwargs)
    optional = len(args) - len(parameters.defaults)
    given, by_name = [], {}
    for n, (name, value) in enumerate(zip(parameters.names, args, strict=True)):
        if n >= optional and (name in taken or takes_names):
            by_name[name] = value
        elif n < optional or value is not parameters.defaults[n - optional]:
            given.append(value)
    return later(*given, **by_name, **kwargs)


def _names_taken(function: Callable[..., Any]) -> tuple[set[str] | None, bool]:
    """What may be given to ``function`` by name, and whether that is anything; None: nobody can say."""
    try:
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return None, False
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes_names = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    return {each.name for each in parameters if each.kind in kinds}, takes_names


def call_with(arguments: ast.arguments, function: str) -> ast.Call:
    """A call of ``function`` with the parameters of a definition as they came."""
    args: list[ast.expr] = [load(a.arg) for a in (*arguments.posonlyargs, *arguments.args)]
    keywords = [ast.keyword(arg=a.arg, value=load(a.arg)) for a in arguments.kwonlyargs]
    if arguments.vararg:
        args.append(ast.Starred(value=load(arguments.vararg.arg), ctx=ast.Load()))
    if arguments.kwarg:
        keywords.append(ast.keyword(arg=None, value=load(arguments.kwarg.arg)))
    return ast.Call(func=load(function), args=args, keywords=keywords)


def load(name: str) -> ast.Name:
    """``name`` as it is read."""
    return ast.Name(id=name, ctx=ast.Load())
