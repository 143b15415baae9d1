"""Runs the bodies of unit tests: enough of C++ to follow loops, tables and helper functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .bench import Bench
from .expressions import Expressions, Scope
from .library import elements
from .statements import File, body_of
from .syntax import Node, Type
from .tokens import Token, Unreadable
from .values import copied

_MOST_STEPS = 200_000
#: why a test is left out that runs the calls of others once more, several at a time
REPEATED = "threads"


class _Return(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class _Break(Exception):
    pass


class _Continue(Exception):
    pass


class Interpreter(Expressions):
    """The statements of one file of tests."""

    def __init__(self, file: File, bench: Bench) -> None:
        super().__init__(file, bench)
        self._bodies: dict[int, list[Node]] = {}
        self._steps = 0

    def restart(self) -> None:
        """Before the next test, which has as many steps as the last."""
        self._steps = 0

    # ---- statements ------------------------------------------------------------------------------
    def run(self, body: Sequence[Token], scope: Scope) -> Any:
        """The value that ``body`` returns."""
        key = id(body)
        if key not in self._bodies:
            self._bodies[key] = body_of(body)
        try:
            self._block(self._bodies[key], scope)
        except _Return as returned:
            return returned.value
        return None

    def _block(self, nodes: Sequence[Node], scope: Scope) -> None:
        for node in nodes:
            self._statement(node, scope)

    def _statement(self, node: Node, scope: Scope) -> None:
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise Unreadable("it does not end")
        kind = node[0]
        if kind == "do":
            self.evaluate(node[1], scope)
        elif kind == "declare":
            self.declare(node, scope)
        elif kind == "block":
            self._block(node[1], Scope(outer=scope))
        elif kind == "branch":
            if self.true(node[1], scope):
                self._statement(node[2], Scope(outer=scope))
            elif node[3]:
                self._statement(node[3], Scope(outer=scope))
        elif kind == "return":
            raise _Return(self.evaluate(node[1], scope) if node[1] else None)
        elif kind in ("for", "each"):
            self._loop(node, scope)
        elif kind == "switch":
            self._switch(node, scope)
        elif kind == "unpack":
            scope.values.update(zip(node[1], self.evaluate(node[2], scope), strict=False))
        elif kind == "class":
            self.file.classes[node[1].name] = node[1]
        elif kind == "break":
            raise _Break
        elif kind == "continue":
            raise _Continue
        else:
            raise Unreadable(f"the test throws, or {kind}")

    def _loop(self, node: Node, scope: Scope) -> None:
        inner = Scope(outer=scope)
        if node[0] == "each":
            _, of, name, values, body = node
            for value in list(elements(self.evaluate(values, scope))):
                inner.values = {name: value if of.shared else copied(value)}
                if not self._once(body, inner):
                    return
            return
        _, first, condition, steps, body = node
        self._statement(first, inner)
        while self.true(condition, inner):
            if not self._once(body, Scope(outer=inner)):
                return
            for step in steps:
                self.evaluate(step, inner)

    def _once(self, body: Node, scope: Scope) -> bool:
        try:
            self._statement(body, scope)
        except _Break:
            return False
        except _Continue:
            pass
        return True

    def _switch(self, node: Node, scope: Scope) -> None:
        value, inner, running = self.evaluate(node[1], scope), Scope(outer=scope), False
        labels = [
            k for k, one in enumerate(node[2]) if one[0] == "case" and self.evaluate(one[1], scope) == value
        ]
        labels += [k for k, one in enumerate(node[2]) if one[0] == "default"]
        try:
            for k, one in enumerate(node[2]):
                running |= bool(labels) and k == labels[0]
                if running and one[0] not in ("case", "default"):
                    self._statement(one, inner)
        except _Break:
            pass

    def declare(self, node: Node, scope: Scope) -> None:
        _, of, names = node
        for name, form, initial, array in names:
            scope.values[name] = self._initial(of, form, initial, array, scope)

    def _initial(self, of: Type, form: str, initial: Any, array: bool, scope: Scope) -> Any:
        if of.name == "thread":
            raise Unreadable(REPEATED)
        if form == "(":
            return self.construct(of, [self.evaluate(one, scope) for one in initial])
        if array:
            of = Type("vector", (of,))
        if form == "":
            return self.construct(of, [])
        value = self.evaluate(initial, scope)
        return self.coerce(of, value if of.shared else copied(value))
