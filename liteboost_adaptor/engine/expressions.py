"""What an expression of a method calls, and which calls may be made later than where they stand."""

from __future__ import annotations

import ast
import types
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard


def child_called(node: ast.AST, self_name: str) -> str:
    """The name, if ``node`` is ``self.name(one positional argument)``; else an empty string."""
    if not _takes_one(node) or not isinstance(node.func, ast.Attribute):
        return ""
    owner = node.func.value
    return node.func.attr if isinstance(owner, ast.Name) and owner.id == self_name else ""


def is_call_of(node: ast.AST | None, children: Collection[str], self_name: str) -> TypeGuard[ast.Call]:
    """Whether ``node`` is ``self.name(one positional argument)`` with a name in ``children``."""
    return node is not None and child_called(node, self_name) in children


def child_handed_extras(node: ast.AST, function: ast.FunctionDef, self_name: str) -> tuple[str, list[str]]:
    """``("child", ["args", "kwargs"])``, if ``node`` is ``self.child(x, *args, **kwargs)``; else both empty.

    ``x`` is a plain name, the others are what ``function`` was called with, and one of them may be missing.
    """
    nothing: tuple[str, list[str]] = "", []
    if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Name):
        return nothing
    starred = [part.value for part in node.args[1:] if isinstance(part, ast.Starred)]
    doubled = [part.value for part in node.keywords if part.arg is None]
    if not len(starred) + len(doubled) == len(node.args) - 1 + len(node.keywords) > 0:
        return nothing
    known = (function.args.vararg, starred), (function.args.kwarg, doubled)
    extras = [parameter.arg for parameter, used in known if parameter and used]
    is_as_given = all(_occurs(function, name)[0] == 1 for name in extras)
    if [getattr(part, "id", "") for part in (*starred, *doubled)] != extras or not is_as_given:
        return nothing
    plain = ast.Call(func=node.func, args=node.args[:1], keywords=[])
    return child_called(plain, self_name), extras


def callee(node: ast.AST, local_names: Collection[str]) -> str:
    """``F.silu``, if ``node`` is ``F.silu(one positional argument)`` and ``F`` a global name; else empty."""
    if not _takes_one(node):
        return ""
    root: ast.expr = node.func
    while isinstance(root, ast.Attribute):
        root = root.value
    if not isinstance(root, ast.Name) or root.id in local_names:
        return ""
    return ast.unparse(node.func)


def callees_in_products(function: ast.FunctionDef, local_names: Collection[str]) -> set[str]:
    """Texts of the global functions whose call is a factor somewhere in a function."""
    products = (n for n in ast.walk(function) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult))
    return {callee(side, local_names) for product in products for side in (product.left, product.right)} - {
        ""
    }


def resolve(text: str, names: Mapping[str, Any]) -> Any:
    """What ``F.silu`` is among the globals ``names``, going through modules only; ``None`` if nothing."""
    first, *rest = text.split(".")
    value = names.get(first)
    for name in rest:
        value = getattr(value, name, None) if isinstance(value, types.ModuleType) else None
    return value


def _takes_one(node: ast.AST) -> TypeGuard[ast.Call]:
    if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
        return False
    return not isinstance(node.args[0], ast.Starred)


def writes_in_place(node: ast.AST) -> bool:
    """Whether something in ``node`` changes a tensor, by torch's names: ``x.mul_(2)``, ``f(a, out=x)``."""
    return any(
        isinstance(part, ast.Call)
        and (
            (isinstance(part.func, ast.Attribute) and _ends_in_one_underscore(part.func.attr))
            or any(keyword.arg == "out" for keyword in part.keywords)
        )
        for part in ast.walk(node)
    )


def _ends_in_one_underscore(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def position(node: ast.expr | ast.stmt) -> tuple[int, int, int | None, int | None]:
    """Where a node stands in the text, which a copy of the tree keeps."""
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


@dataclass
class Delayed:
    """Calls ``t = self.child(a)`` that may be made where ``t`` is multiplied.

    Attributes:
        statements: Positions of the assignments.
        factors: Position of the name ``t`` in the product -> the call.
    """

    statements: set[Any] = field(default_factory=set)
    factors: dict[Any, ast.Call] = field(default_factory=dict)


def delayed_calls(
    function: ast.FunctionDef, self_name: str, children: Collection[str], pure: Collection[str]
) -> Delayed:
    """Find ``t = self.child(a)`` whose result is used once, as a factor further down in the same block.

    The call moves down to the product, past the statements between. That is sound when nothing there can
    change ``a``: they call nothing but the children in ``pure``, and write to no tensor in place.

    Args:
        children: Names whose calls are looked for.
        pure: Names of children that change none of their arguments.
    """
    found = Delayed()
    for block in _blocks(function):
        for index, statement in enumerate(block):
            if not assigns_to_name(statement) or not is_call_of(statement.value, children, self_name):
                continue
            name = assigned_name(statement)
            use = _only_use(function, block, index, name, self_name, pure) if name != self_name else None
            if use is not None:
                found.statements.add(position(statement))
                found.factors[position(use)] = statement.value
    return found


def _blocks(function: ast.FunctionDef) -> Iterator[list[ast.stmt]]:
    """The lists of statements the rewriting goes through: the body and the branches of ``if``."""
    pending = [function.body]
    while pending:
        block = pending.pop()
        yield block
        for statement in block:
            if isinstance(statement, ast.If):
                pending += [statement.body, statement.orelse]


def _only_use(
    function: ast.FunctionDef,
    block: list[ast.stmt],
    index: int,
    name: str,
    self_name: str,
    pure: Collection[str],
) -> ast.Name | None:
    """The factor ``name`` of a product in a statement below, if it is the only use of the assignment."""
    for statement in block[index + 1 :]:
        uses = [node for node in ast.walk(statement) if isinstance(node, ast.Name) and node.id == name]
        factor = _factor(statement, name)
        if not _is_harmless(statement, self_name, pure):
            return None
        if not uses:
            continue
        loads = [use for use in uses if isinstance(use.ctx, ast.Load)]
        if factor is None or loads != [factor]:
            return None
        # Whoever reads the name afterwards must read another value of it.
        is_overwritten = assigned_name(statement) == name
        return factor if is_overwritten or _occurs(function, name) == (1, 1) else None
    return None


def _factor(statement: ast.stmt, name: str) -> ast.Name | None:
    for node in ast.walk(statement):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            for side in (node.left, node.right):
                if isinstance(side, ast.Name) and side.id == name:
                    return side
    return None


def _is_harmless(statement: ast.stmt, self_name: str, pure: Collection[str]) -> bool:
    """Whether it is an assignment to a name or a return that calls nothing but ``pure`` children."""
    if not assigned_name(statement) and not (
        isinstance(statement, ast.Return) and statement.value is not None
    ):
        return False
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return all(child_called(call, self_name) in pure for call in calls) and not any(
        isinstance(node, (ast.Lambda, ast.ListComp, ast.GeneratorExp, ast.NamedExpr, ast.IfExp, ast.BoolOp))
        for node in ast.walk(statement)
    )


def _occurs(function: ast.FunctionDef, name: str) -> tuple[int, int]:
    """How often ``name`` is stored and loaded (or deleted) in a function; a parameter counts as stored."""
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name]
    arguments = [node for node in ast.walk(function) if isinstance(node, ast.arg) and node.arg == name]
    stored = sum(isinstance(node.ctx, ast.Store) for node in names) + len(arguments)
    return stored, len(names) + len(arguments) - stored


def assigned_name(statement: ast.stmt | None) -> str:
    """The name a plain assignment stores to, else an empty string."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return ""
    return statement.targets[0].id if isinstance(statement.targets[0], ast.Name) else ""


def assigns_to_name(statement: ast.stmt | None) -> TypeGuard[ast.Assign]:
    """Whether it is a plain assignment to one name."""
    return bool(assigned_name(statement))
