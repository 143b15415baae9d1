"""Reroute expressions inside a method, leaving everything else of it as its author wrote it.

Whole attention, MLP and decoder-layer bodies come in hundreds of forms, but what is worth replacing in
them comes in a few, each sound by itself whatever surrounds it:

- *call*: ``self.child(x)`` becomes ``r(self.child, x)``, and ``self.child(x, *args, **kwargs)`` too, for as
  long as nothing more than ``x`` has come in;
- *product*: ``self.child(a) * b`` becomes ``r(self.child, a, b)``, also where ``t = self.child(a)`` stands
  in a statement before and ``t`` serves nothing else. Where both factors are made of calls,
  ``self.child(self.left(x)) * self.right(x)``, and ``r`` has an ``of_calls`` that can join them, it becomes
  ``r.of_calls(r_left, r_right)(self.child, self.left, self.right, x)``;
- *factor*: ``f(a) * b`` for a function ``f`` becomes ``r(f, a, b)``;
- *residual*: ``s = a + b`` followed by ``n = self.child(s)`` becomes ``n, s = r(self.child, a, b)``;
- *receiver*: ``x.method(a, b, ...)`` of a local ``x`` becomes ``r(x, self, known).method(a, b, ...)``, where
  ``known`` says that the results go to attention alone (`engine.handed_on`);
- *function*: a global ``f``, called or handed on, becomes ``r`` for as long as ``f`` is the function it was.

The new function keeps file name and line numbers (tracebacks and debuggers show the original text),
globals, defaults, closure and decorators, and traces like any other function.
"""

from __future__ import annotations

import ast
import copy
import pickle
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeGuard, cast

from .. import watch
from . import handed_on, source
from .expressions import (
    assigned_name,
    assigns_to_name,
    callee,
    child_called,
    child_handed_extras,
    delayed_calls,
    is_call_of,
    position,
    writes_in_place,
)
from .later_patch import call_with, load, yield_to_later_patch
from .source import SourceUnavailable

#: A dictionary's method of the same name takes fewer.
_RECEIVER_ARGUMENTS = 2


@dataclass
class Routes:
    """What to reroute in one method: by pattern, the name in the text and the object that takes its place.

    ``function`` maps a global name to (original, replacement), ``factor`` the text of a callee, such as
    ``F.silu``, to the replacement of the product, ``receiver`` the name of a method to what is called with
    the object it is called on, the module that calls, and whether its results go to attention alone.
    """

    call: dict[str, Any] = field(default_factory=dict)
    product: dict[str, Any] = field(default_factory=dict)
    factor: dict[str, Any] = field(default_factory=dict)
    residual: dict[str, Any] = field(default_factory=dict)
    receiver: dict[str, Any] = field(default_factory=dict)
    function: dict[str, tuple[Any, Any]] = field(default_factory=dict)


ROUTE_NAMES = tuple(each.name for each in fields(Routes))


@dataclass(frozen=True)
class Rewritten:
    """A rerouted method and what was found in it: pattern -> names that were met."""

    function: types.FunctionType
    met: Mapping[str, frozenset[str]]


def rewrite(method: Any, routes: Routes, owner: type | None = None, attribute: str = "") -> Rewritten | None:
    """A copy of ``method`` with ``routes`` taken, or ``None`` when none of them occurs in it.

    With ``owner``, the copy yields to whatever someone else puts in place of ``owner``'s ``attribute`` later.

    Raises:
        SourceUnavailable: The method cannot be rewritten soundly; the message says why.
    """
    parsed = source.parse(source.innermost(method))
    if not parsed.node.args.args:
        return None
    editor = _Editor(routes, parsed)
    node = editor.visit(_copy(parsed.node))
    if not any(editor.met.values()):
        return None
    if editor.rebinds_self:
        raise SourceUnavailable(f"assigns to {editor.self_name}")
    if any(_is_private(child) for child in ast.walk(node)):
        raise SourceUnavailable("uses a private name (two leading underscores)")
    names = {**editor.names, **yield_to_later_patch(node, method, owner, attribute)}
    function = rewrap(method, build(node, parsed, names))
    return Rewritten(function, {pattern: frozenset(names) for pattern, names in editor.met.items() if names})


def _copy(node: ast.FunctionDef) -> ast.FunctionDef:
    """All of a tree, in a third of the time that ``copy.deepcopy`` takes."""
    copied: ast.FunctionDef = pickle.loads(pickle.dumps(node, pickle.HIGHEST_PROTOCOL))
    return copied


def forwarding(
    method: Any, replacement: Any, owner: type | None = None, attribute: str = ""
) -> types.FunctionType:
    """A function with the signature of ``method`` that hands its arguments to ``replacement`` by position.

    With ``owner``, it yields to whatever someone else puts in place of ``owner``'s ``attribute`` later.

    Raises:
        SourceUnavailable: ``method`` has no plain source, or takes ``*args`` or ``**kwargs``.
    """
    parsed = source.parse(source.innermost(method))
    arguments = parsed.node.args
    if arguments.vararg or arguments.kwarg or arguments.kwonlyargs:
        raise SourceUnavailable("takes *args, **kwargs or keyword-only arguments")
    node = copy.copy(parsed.node)
    node.body = [ast.copy_location(ast.Return(value=call_with(arguments, "__liteboost_ours__")), parsed.node)]
    names = {"__liteboost_ours__": replacement, **yield_to_later_patch(node, method, owner, attribute)}
    function = build(node, parsed, names)
    vars(function)["__liteboost_original__"] = method
    return function


def rewrap(method: Any, inner: types.FunctionType) -> types.FunctionType:
    """``method`` with its innermost function exchanged for ``inner`` and every wrapper around it repeated.

    A wrapper made by a decorator holds the function it wraps in its closure (and itself, where it
    compares identities, as gradient checkpointing does); a copy of it with those cells exchanged does what
    the original does.

    Raises:
        SourceUnavailable: A wrapper does not hold what it wraps in its closure.
    """
    if not hasattr(method, "__wrapped__"):
        return inner
    if type(method) is not types.FunctionType:
        raise SourceUnavailable(f"is wrapped by a {type(method).__name__}")
    within = vars(method)["__wrapped__"]
    wrapped = rewrap(within, inner)
    cells = list(method.__closure__ or ())
    held = [contents(cell) for cell in cells]
    if not any(value is within for value in held):
        raise SourceUnavailable("is wrapped in a way that cannot be repeated")
    own = types.CellType()
    exchanged = tuple(
        types.CellType(wrapped) if value is within else own if value is method else cell
        for cell, value in zip(cells, held, strict=True)
    )
    copied = types.FunctionType(
        method.__code__, method.__globals__, method.__name__, method.__defaults__, exchanged
    )
    own.cell_contents = copied
    copied.__kwdefaults__, copied.__annotations__ = method.__kwdefaults__, method.__annotations__
    copied.__qualname__, copied.__module__, copied.__doc__ = (
        method.__qualname__,
        method.__module__,
        method.__doc__,
    )
    copied.__dict__ = method.__dict__  # the same one: state that a decorator keeps on its wrapper stays one
    return copied


def contents(cell: types.CellType) -> Any:
    """What a closure's cell holds; ``None`` when it is empty."""
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell: the name is bound later
        return None


def build(node: ast.FunctionDef, parsed: source.Source, names: Mapping[str, Any]) -> types.FunctionType:
    original = parsed.function
    code = source.compile_in_factory(ast.fix_missing_locations(node), original.__code__, tuple(names))
    watch.rewritten.update(source.nested_codes(code))
    cells = source.free_cells(original)
    closure = tuple(
        cells[name] if name in cells else types.CellType(names[name]) for name in code.co_freevars
    )
    function = types.FunctionType(
        code, original.__globals__, original.__name__, original.__defaults__, closure
    )
    function.__kwdefaults__ = original.__kwdefaults__
    function.__annotations__ = original.__annotations__
    function.__qualname__, function.__module__ = original.__qualname__, original.__module__
    function.__doc__ = original.__doc__
    return function


def _is_private(node: ast.AST) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.startswith("__") and not name.endswith("__")


class _Editor(ast.NodeTransformer):
    """Applies the routes to one definition, collecting the names it introduced."""

    def __init__(self, routes: Routes, parsed: source.Source) -> None:
        self.routes = routes
        self.definition = parsed.node
        self.self_name = parsed.node.args.args[0].arg
        self.local_names = frozenset(parsed.function.__code__.co_varnames)
        self.delayed = delayed_calls(parsed.node, self.self_name, routes.product, routes.call)
        self.names: dict[str, Any] = {}
        self.met: dict[str, set[str]] = {pattern: set() for pattern in ROUTE_NAMES}
        self.rebinds_self = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.body = self._statements(node.body)
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        node.test = self.visit(node.test)
        node.body, node.orelse = self._statements(node.body), self._statements(node.orelse)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id == self.self_name and not isinstance(node.ctx, ast.Load):
            self.rebinds_self = True
        is_global = isinstance(node.ctx, ast.Load) and node.id not in self.local_names
        return self._function(node) if is_global and node.id in self.routes.function else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        # Made in one, the product reads the activation's argument after the other factor was computed.
        if isinstance(node.op, ast.Mult) and not writes_in_place(node):
            for called, other in ((node.left, node.right), (node.right, node.left)):
                product = self._product(node, called, other)
                if product is not None:
                    return product
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if position(node) in self.delayed.statements:  # the call is made where its result is used
            node.value = cast(ast.Call, node.value).args[0]
        return self.generic_visit(node)

    def _product(self, node: ast.BinOp, called: ast.expr, other: ast.expr) -> ast.AST | None:
        call = self.delayed.factors.get(position(called))
        if call is not None:
            arguments = [copy.deepcopy(call.func), called, self.visit(other)]
            name = child_called(call, self.self_name)
            return self._replace(node, "product", name, self.routes.product[name], arguments)
        if self._calls_child(called, self.routes.product):
            name = child_called(called, self.self_name)
            joined = self._product_of_calls(node, called, other)
            if joined is not None:
                return joined
            return self._in_order(node, called, other, "product", name, self.routes.product[name])
        text = callee(called, self.local_names)
        if text in self.routes.factor:
            called = cast(ast.Call, called)
            return self._in_order(node, called, other, "factor", text, self.routes.factor[text])
        return None

    def _in_order(
        self, node: ast.BinOp, called: ast.Call, other: ast.expr, pattern: str, name: str, target: Any
    ) -> ast.AST:
        """``r(f, a, b)`` for ``f(a) * b``; for ``b * f(a)`` the same with ``b`` computed first, as it was."""
        argument, factor = called.args[0], other
        if called is node.left:
            arguments = [called.func, self.visit(argument), self.visit(factor)]
            return self._replace(node, pattern, name, target, arguments)
        arguments = [called.func, self.visit(factor), self.visit(argument)]
        return self._replace(node, pattern, name, _factor_first(target), arguments, f"{name}_second")

    def _product_of_calls(self, node: ast.BinOp, called: ast.Call, other: ast.expr) -> ast.AST | None:
        """``self.child(self.left(x)) * self.right(x)`` of a local ``x``, if ours can be joined."""
        inner, name = called.args[0], child_called(called, self.self_name)
        if not self._calls_child(inner, self.routes.call) or not self._calls_child(other, self.routes.call):
            return None
        left, right = child_called(inner, self.self_name), child_called(other, self.self_name)
        x = inner.args[0]
        if not isinstance(x, ast.Name):
            return None
        if x.id not in self.local_names or not _names(other.args[0], x.id):
            return None
        join = getattr(self.routes.product[name], "of_calls", None)
        target = join(self.routes.call[left], self.routes.call[right]) if join is not None else None
        if target is None:
            return None
        self.met["call"] |= {left, right}
        label = f"{name}_{left}_{right}"
        return self._replace(node, "product", name, target, [called.func, inner.func, other.func, x], label)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if self._calls_child(node, self.routes.call):
            name = child_called(node, self.self_name)
            arguments = [node.func, self.visit(node.args[0])]
            return self._replace(node, "call", name, self.routes.call[name], arguments)
        name, extras = child_handed_extras(node, self.definition, self.self_name)
        if name in self.routes.call:
            return self._call_without_extras(node, name, extras)
        self.generic_visit(node)
        method = node.func
        if not isinstance(method, ast.Attribute) or method.attr not in self.routes.receiver:
            return node
        if self._is_local(method.value) and len(node.args) >= _RECEIVER_ARGUMENTS:
            is_handed_on = handed_on.is_handed_on(
                self.definition, node.lineno, node.col_offset, self.self_name
            )
            target = self.routes.receiver[method.attr]
            arguments = [method.value, load(self.self_name), ast.Constant(is_handed_on)]
            method.value = self._replace(method.value, "receiver", method.attr, target, arguments)
        return node

    def _is_local(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in self.local_names and node.id != self.self_name

    def _call_without_extras(self, node: ast.Call, name: str, extras: list[str]) -> ast.AST:
        """``self.child(x, *args, **kwargs) if args or kwargs else r(self.child, x)``."""
        arguments = [node.func, self.visit(node.args[0])]
        ours = self._replace(node, "call", name, self.routes.call[name], arguments)
        given: list[ast.expr] = [load(extra) for extra in extras]
        test = ast.BoolOp(op=ast.Or(), values=given) if len(given) > 1 else given[0]
        return ast.copy_location(ast.IfExp(test=test, body=node, orelse=ours), node)

    def _calls_child(self, node: ast.AST | None, table: Mapping[str, Any]) -> TypeGuard[ast.Call]:
        """Whether ``node`` is ``self.name(one positional argument)`` with a name in ``table``."""
        return is_call_of(node, table, self.self_name)

    def _function(self, name: ast.Name) -> ast.AST:
        original, replacement = self.routes.function[name.id]
        self.met["function"].add(name.id)
        same = ast.Compare(
            left=load(name.id), ops=[ast.Is()], comparators=[load(self._bind(name.id, original))]
        )
        choice = ast.IfExp(
            test=same, body=load(self._bind(f"{name.id}_ours", replacement)), orelse=load(name.id)
        )
        return ast.copy_location(choice, name)

    def _replace(
        self,
        node: ast.AST,
        pattern: str,
        name: str,
        target: Any,
        arguments: list[ast.expr],
        label: str = "",
    ) -> ast.Call:
        self.met[pattern].add(name)
        function = load(self._bind(f"{pattern}_{label or name}", target))
        call = ast.Call(func=function, args=arguments, keywords=[])
        return ast.copy_location(call, node)

    def _bind(self, label: str, value: Any) -> str:
        name = f"__liteboost_{label.replace('.', '_')}__"
        self.names[name] = value
        return name

    def _statements(self, body: list[ast.stmt]) -> list[ast.stmt]:
        result: list[ast.stmt] = []
        position = 0
        while position < len(body):
            fused, used = self._residual(body[position : position + 3])
            result += fused or [self.visit(body[position])]
            position += used or 1
        return result

    def _residual(self, body: list[ast.stmt]) -> tuple[list[ast.stmt], int]:
        """``s = a + b; [r = s;] n = self.norm(s)`` as ``n, s = fused(self.norm, a, b); [r = s]``."""
        first = body[0] if body else None
        if not assigns_to_name(first) or not isinstance(first.value, ast.BinOp):
            return [], 0
        total = assigned_name(first)
        kept = assigned_name(body[1]) if len(body) > 1 and _copies(body[1], total) else ""
        last = body[2 if kept else 1] if len(body) > (2 if kept else 1) else None
        if not assigns_to_name(last) or not self._calls_child(last.value, self.routes.residual):
            return [], 0
        normed, name = assigned_name(last), child_called(last.value, self.self_name)
        if (
            not isinstance(first.value.op, ast.Add)
            or not _names(last.value.args[0], total)
            or self.self_name in (total, normed)
            or kept in (total, normed, self.self_name)
        ):
            return [], 0
        terms = [self.visit(first.value.left), self.visit(first.value.right)]
        call = self._replace(last, "residual", name, self.routes.residual[name], [last.value.func, *terms])
        # Where the norm overwrites the sum, only the second name keeps it.
        holder = total if normed != total else kept or "__liteboost_sum__"
        targets = ast.Tuple(elts=[ast.Name(id=n, ctx=ast.Store()) for n in (normed, holder)], ctx=ast.Store())
        statements: list[ast.stmt] = [ast.copy_location(ast.Assign(targets=[targets], value=call), last)]
        if kept and holder != kept:
            copied = ast.Assign(targets=[ast.Name(id=kept, ctx=ast.Store())], value=load(holder))
            statements.append(ast.copy_location(copied, body[1]))
        return statements, 3 if kept else 2


def _factor_first(target: Callable[..., Any]) -> Callable[..., Any]:
    """``target(function, argument, factor)`` with its last two arguments exchanged."""

    def exchanged(function: Any, factor: Any, argument: Any) -> Any:
        return target(function, argument, factor)

    return exchanged


def _names(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _copies(statement: ast.stmt, name: str) -> bool:
    return isinstance(statement, ast.Assign) and _names(statement.value, name)
