"""Whether all that becomes of a call's results is that attention is given them, at once."""

from __future__ import annotations

import ast

#: Arguments of attention: the module, queries, keys, values, the mask.
_FIRST, _LAST = 2, 4
_LOOKS_UP = "get_interface"
_IN_TURN = (
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.Try,
    ast.Lambda,
    ast.FunctionDef,
    ast.comprehension,
    ast.With,
)


def is_handed_on(function: ast.FunctionDef, line: int, column: int, self_name: str) -> bool:
    """Whether what the call at ``line`` and ``column`` gives goes to attention, and nowhere else.

    It is ``a, b = x.update(a, b, n, kwargs=kwargs)``, behind which, with nothing between that could run code
    of others, ``f = registry.get_interface(...)`` and ``f(self, q, a, b, ..., **kwargs)`` follow.
    """
    if any(isinstance(node, _IN_TURN) for node in ast.walk(function) if node is not function):
        return False
    for at, statement in enumerate(function.body):
        if _holds(statement, line, column):
            names, kwargs = _results_of(statement, line, column)
            return bool(names) and _goes_to_attention(function.body[at + 1 :], names, kwargs, self_name)
    return False


def _holds(statement: ast.stmt, line: int, column: int) -> bool:
    return any(
        isinstance(node, ast.Call) and (node.lineno, node.col_offset) == (line, column)
        for node in ast.walk(statement)
    )


def _results_of(statement: ast.stmt, line: int, column: int) -> tuple[list[str], str]:
    """The names that two results get, and that of ``kwargs``; an ``if`` may do nothing else."""
    if isinstance(statement, ast.If) and len(statement.body) == 1 and not statement.orelse:
        statement = statement.body[0]
    if not isinstance(statement, ast.Assign) or not isinstance(call := statement.value, ast.Call):
        return [], ""
    if (call.lineno, call.col_offset) != (line, column):
        return [], ""
    (target, *others), keywords = statement.targets, call.keywords
    if others or not isinstance(target, ast.Tuple) or len(target.elts) != 2:
        return [], ""
    names = [each.id for each in target.elts if isinstance(each, ast.Name)]
    given = [each.id for each in call.args[:2] if isinstance(each, ast.Name)]
    if len(keywords) != 1 or keywords[0].arg != "kwargs" or not isinstance(keywords[0].value, ast.Name):
        return [], ""
    is_plain = len(names) == len(set(names)) == 2 and given == names and len(call.args) == 3
    return (names, keywords[0].value.id) if is_plain else ([], "")


def _goes_to_attention(rest: list[ast.stmt], names: list[str], kwargs: str, self_name: str) -> bool:
    if len(rest) < 2:
        return False
    look_up, attends, *behind = rest
    call = attends.value if isinstance(attends, ast.Assign) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        return False
    if call.func.id != _looked_up(look_up, self_name) or not _are_arguments(call, names, kwargs, self_name):
        return False
    used = {node.id for each in behind for node in ast.walk(each) if isinstance(node, ast.Name)}
    return used.isdisjoint({*names, kwargs})


def _looked_up(statement: ast.stmt, self_name: str) -> str:
    """The name that a registry's entry for the module's implementation gets."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign):
        return ""
    targets: list[ast.expr] = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    target, value = targets[0], statement.value
    if len(targets) != 1:
        return ""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute) or not value.args:
        return ""
    asked = ast.unparse(value.args[0]) == f"{self_name}.config._attn_implementation"
    is_look_up = value.func.attr == _LOOKS_UP and isinstance(value.func.value, ast.Name) and asked
    return target.id if is_look_up and isinstance(target, ast.Name) else ""


def _are_arguments(call: ast.Call, names: list[str], kwargs: str, self_name: str) -> bool:
    """Whether attention is called with the results as keys and values, each there once, and ``**kwargs``."""
    first, given = call.args[:1], call.args[_FIRST:_LAST]
    if [each.id for each in first + given if isinstance(each, ast.Name)] != [self_name, *names]:
        return False
    found = [node.id for node in ast.walk(call) if isinstance(node, ast.Name)]
    hands_all = any(
        each.arg is None and isinstance(each.value, ast.Name) and each.value.id == kwargs
        for each in call.keywords
    )
    return hands_all and all(found.count(name) == 1 for name in (*names, kwargs))
