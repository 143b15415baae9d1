"""Layers that run attention and MLP in parallel and add both: one all-reduce for the two.

Where the code shows that the two outputs are only ever added to each other, attention leaves its partial
sum to the MLP, which reduces both at once.
"""

from __future__ import annotations

import ast
from typing import Any

from torch import nn

from . import source_checks
from .layout_builder import LayoutBuilder


def pair_branches(builder: LayoutBuilder) -> None:
    """Let MLPs reduce the output of the parallel attention with their own."""
    for name, layer in builder.modules.items():
        outputs = builder.row_parallel_below(name)
        if len(outputs) != 2 or len({full[len(name) + 1 :].partition(".")[0] for full in outputs}) != 2:
            continue
        first, second = outputs
        attention, mlp = (full[len(name) + 1 :].partition(".")[0] for full in outputs)
        if not _is_direct(builder, name, attention, first) or not _is_direct(builder, name, mlp, second):
            continue
        if _only_added(layer, attention, mlp):
            builder.defer_all_reduce(second, first)
        elif _only_added(layer, mlp, attention):
            builder.defer_all_reduce(first, second)


def _is_direct(builder: LayoutBuilder, name: str, child: str, output: str) -> bool:
    """Whether ``child`` of a layer returns what its ``output`` layer returns, as it is."""
    prefix = f"{name}.{child}" if name else child
    local = output[len(prefix) + 1 :]
    module = builder.modules[prefix]
    paths = _paths(module, source_checks.forward_of(module))
    return (
        bool(local)
        and "." not in local
        and bool(paths)
        and all(_gives(module, path, local) for path in paths)
    )


def _gives(module: nn.Module, body: list[ast.stmt], local: str) -> bool:
    """Whether statements call child ``local`` once and return what it gives, as it is."""
    calls = [index for index, node in enumerate(body) if _calls_of(node, local)]
    if len(calls) != 1 or len(_calls_of(body[calls[0]], local)) != 1:
        return False
    statement, rest = body[calls[0]], body[calls[0] + 1 :]
    if isinstance(statement, ast.Return):
        return _kept(module, statement.value, "", local)
    target = _target(statement)
    if target is None or not _kept(module, statement.value, "", local):
        return False
    for node in rest[:-1]:
        if target in _names(node) and not (_target(node) == target and _kept(module, node.value, target, "")):
            return False
    last = rest[-1] if rest else None
    if not isinstance(last, ast.Return):
        return False
    value = last.value.elts[0] if isinstance(last.value, ast.Tuple) else last.value
    return isinstance(value, ast.Name) and value.id == target and _count(last, target) == 1


def _only_added(layer: nn.Module, first: str, second: str) -> bool:
    """Whether ``forward`` calls child ``first``, then ``second``, and does nothing with both but add them."""
    body = _straight(layer, source_checks.forward_of(layer))
    if body is None:
        return False
    starts = []
    for child in (first, second):
        found = [index for index, node in enumerate(body) if _calls_of(node, child)]
        if len(found) != 1 or len(_calls_of(body[found[0]], child)) != 1:
            return False
        starts.append(found[0])
    targets = [_target(body[index]) for index in starts]
    if None in targets or targets[0] == targets[1] or starts[0] >= starts[1]:
        return False
    if not all(
        _kept(layer, _value(body[i]), "", child) for i, child in zip(starts, (first, second), strict=True)
    ):
        return False
    for index, node in enumerate(body[starts[0] + 1 :], starts[0] + 1):
        used = [target for target in targets if _count(node, target)]
        if index == starts[1]:
            used = [target for target in used if target != targets[1]]
            if used:
                return False
        elif used and _is_sum(node, targets):
            return not any(_count(later, targets[0]) for later in body[index + 1 :])
        elif used and not (
            _target(node) == used[0] and _kept(layer, node.value, used[0], "") and len(used) == 1
        ):
            return False
    return False


def _is_sum(node: ast.stmt, targets: list[str]) -> bool:
    """Whether a statement adds both, each once, and uses them for nothing else."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        terms = [node.target, node.value]
    elif isinstance(node, ast.Assign):
        terms = _terms(node.value)
    else:
        return False
    names = [term.id for term in terms if isinstance(term, ast.Name)]
    return all(names.count(target) == 1 for target in targets) and all(
        not (set(targets) & _names(term)) for term in terms if not isinstance(term, ast.Name)
    )


def _terms(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_terms(node.left), *_terms(node.right)]
    return [node]


def _straight(module: nn.Module, forward: ast.FunctionDef | None) -> list[ast.stmt] | None:
    """The statements that run, one after the other; None where that is not known."""
    if forward is None:
        return None
    found: list[ast.stmt] = []
    todo = list(forward.body)
    while todo:
        node = todo.pop(0)
        if isinstance(node, ast.If):
            try:
                todo = [*(node.body if _evaluated(module, node.test) else node.orelse), *todo]
            except _Unknown:
                found.append(node)  # whoever meets one of the names in it gives up
        elif isinstance(node, ast.Return):
            return [*found, node]
        else:
            found.append(node)
    return None


#: Paths through a forward that are followed; none where there are more.
_MAX_PATHS = 64


def _paths(module: nn.Module, forward: ast.FunctionDef | None) -> list[list[ast.stmt]]:
    """The statements of every path through ``forward``; none where they are not known."""
    todo = [([], list(forward.body))] if forward is not None else []
    found: list[list[ast.stmt]] = []
    while todo:
        done, rest = todo.pop()
        if not rest or len(found) + len(todo) > _MAX_PATHS:
            return []
        node, *rest = rest
        if isinstance(node, ast.If):
            try:
                branches = [node.body if _evaluated(module, node.test) else node.orelse]
            except _Unknown:
                branches = [node.body, node.orelse]
            todo += [(list(done), [*branch, *rest]) for branch in branches]
        elif isinstance(node, ast.Return):
            found.append([*done, node])
        elif isinstance(node, ast.Raise):
            continue
        else:
            todo.append(([*done, node], rest))
    return found


class _Unknown(Exception):
    """A condition that the configuration does not decide."""


def _evaluated(module: nn.Module, node: ast.expr) -> Any:
    """A condition on attributes of ``module`` that are set once."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not _evaluated(module, node.operand)
    if isinstance(node, ast.BoolOp):
        values = [_evaluated(module, each) for each in node.values]
        return all(values) if isinstance(node.op, ast.And) else any(values)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
        return _evaluated(module, node.left) == _evaluated(module, node.comparators[0])
    path = source_checks.path_of(node)
    value: Any = module
    for name in path.split(".") if path else ["?"]:
        value = getattr(value, name, _Unknown)
    if type(value) not in (bool, int, str):
        raise _Unknown
    return value


def _target(node: ast.stmt) -> str | None:
    """The variable that takes a result, or the first part of one."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return None
    target = node.targets[0]
    if isinstance(target, ast.Tuple) and target.elts:
        target = target.elts[0]
    return target.id if isinstance(target, ast.Name) else None


def _value(node: ast.stmt) -> ast.expr | None:
    return node.value if isinstance(node, (ast.Assign, ast.Return)) else None


def _kept(module: nn.Module, node: ast.expr | None, variable: str, child: str) -> bool:
    """Whether an expression is ``variable``, or a call of ``child``, or either behind a dropout."""
    if isinstance(node, ast.Name):
        return node.id == variable
    if not isinstance(node, ast.Call):
        return False
    path = source_checks.path_of(node.func)
    if child and path == child:
        return True
    called = getattr(module, path, None) if path else None
    return (
        isinstance(called, nn.Dropout)
        and len(node.args) == 1
        and _kept(module, node.args[0], variable, child)
    )


def _calls_of(node: ast.AST, child: str) -> list[ast.Call]:
    return [
        each
        for each in ast.walk(node)
        if isinstance(each, ast.Call) and source_checks.path_of(each.func) == child
    ]


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _count(node: ast.AST, name: str) -> int:
    return sum(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node))
