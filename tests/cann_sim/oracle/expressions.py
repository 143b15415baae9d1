"""Evaluates expressions of C++ on values of Python."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from . import library
from .statements import Class, File, Function
from .syntax import NUMBERS, Node, Type
from .tokens import Token, Unreadable
from .values import Comparison, Iterator, Opaque, Shape, Status, Struct, Symbol, Vector, copied

_OPERATORS = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "%": operator.mod, "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le, ">=": operator.ge, "|": operator.or_, "&": operator.and_, "^": operator.xor,
    "<<": operator.lshift, ">>": operator.rshift,
}  # fmt: skip


@dataclass
class Bound:
    """A function of the file, a member of ``this``, or a lambda with the scope it was made in."""

    parameters: tuple[tuple[Type, str, Node | None], ...]
    body: Sequence[Token]
    this: Struct | None = None
    scope: Scope | None = None


@dataclass
class Scope:
    values: dict[str, Any] = field(default_factory=dict)
    outer: Scope | None = None
    this: Struct | None = None

    def holder(self, name: str) -> dict[str, Any] | None:
        if name in self.values:
            return self.values
        if self.this and name in self.this.fields:
            return self.this.fields
        return self.outer.holder(name) if self.outer else None

    def self(self) -> Struct | None:
        return self.this or (self.outer.self() if self.outer else None)


class Expressions:
    """Of one file. ``bench`` is what the calls of the test framework are recorded by (`library.Bench`)."""

    def __init__(self, file: File, bench: library.Bench) -> None:
        self.file, self.bench = file, bench
        self.globals = Scope()
        self._variables = {
            name: node for node in file.variables if node[0] == "declare" for name, *_ in node[2]
        }
        last: Any = -1
        for name, value in file.enumerations:
            last = self.evaluate(value, self.globals) if value else (last + 1 if isinstance(last, int) else 0)
            self.globals.values[name] = last

    def run(self, body: Sequence[Token], scope: Scope) -> Any:
        """The value that the statements of ``body`` return."""
        raise NotImplementedError

    def declare(self, node: Node, scope: Scope) -> None:
        raise NotImplementedError

    # ---- types -----------------------------------------------------------------------------------
    def coerce(self, of: Type, value: Any) -> Any:
        """``value`` as one of the type: lists in braces become what they initialize."""
        if not isinstance(value, Vector) or (of.shared and value and isinstance(value[0], Struct)):
            return value
        if of.name in library.SEQUENCES:
            element = of.arguments[0] if of.arguments else None
            made = (
                value
                if of.shared and value.of
                else Vector(self.coerce(element, one) if element else one for one in value)
            )
            made.of = element
            return made
        if of.name in self.file.classes or of.name in library.BRACED:
            return self.construct(of, list(value))
        if of.name in NUMBERS and len(value) == 1:
            return value[0]
        return value

    def construct(self, of: Type, arguments: list[Any]) -> Any:
        if of.name in self.file.classes:
            return self._struct(self.file.classes[of.name], arguments)
        return library.construct(self, of, arguments)

    def _struct(self, of: Class, arguments: list[Any]) -> Any:
        if len(arguments) == 1 and isinstance(arguments[0], Struct) and arguments[0].name == of.name:
            return copied(arguments[0])
        made, fields = Struct(of.name), self._fields(of)
        if len(arguments) > len(fields):
            raise Unreadable(f"{of.name} has {len(fields)} fields, {len(arguments)} are given")
        scope = Scope(this=made, outer=self.globals)
        for k, (type_, name, default) in enumerate(fields):
            if k < len(arguments):
                made.fields[name] = self.coerce(type_, copied(arguments[k]))
            elif default is not None:
                made.fields[name] = self.coerce(type_, self.evaluate(default, scope))
            else:
                made.fields[name] = self.construct(type_, [])
        return made

    def _fields(self, of: Class) -> list[tuple[Type, str, Node | None]]:
        inherited = [
            one
            for base in of.bases
            if base in self.file.classes
            for one in self._fields(self.file.classes[base])
        ]
        return inherited + of.fields

    def method(self, class_name: str, name: str) -> Function | None:
        of = self.file.classes.get(class_name)
        if not of:
            return None
        found = of.functions.get(name)
        return found or next((f for base in of.bases if (f := self.method(base, name))), None)

    # ---- expressions -----------------------------------------------------------------------------
    def evaluate(self, node: Node, scope: Scope) -> Any:
        return getattr(self, f"_{node[0]}")(node, scope)

    def true(self, node: Node, scope: Scope) -> bool:
        value = self.evaluate(node, scope)
        if isinstance(value, Comparison | Status):
            return False  # what follows a success is no part of a parameter set
        return bool(value)

    def _value(self, node: Node, scope: Scope) -> Any:
        return node[1]

    def _list(self, node: Node, scope: Scope) -> Any:
        return Vector(self.evaluate(one, scope) for one in node[1])

    def _name(self, node: Node, scope: Scope) -> Any:
        name = node[1]
        if name == "this":
            return scope.self()
        holder = scope.holder(name) or self.globals.holder(name)
        if holder is not None:
            return holder[name]
        if name in self._variables:
            declared = self._variables[name]
            self.declare(
                (declared[0], declared[1], [one for one in declared[2] if one[0] == name]), self.globals
            )
            return self.globals.values[name]
        if function := self._function(name, scope):
            return function
        return library.constant(name, self.bench)

    def _function(self, name: str, scope: Scope) -> Bound | None:
        this = scope.self()
        if this and (member := self.method(this.name, name)):
            return Bound(member.parameters, member.body, this)
        found = self.file.functions.get(name)
        return Bound(found.parameters, found.body) if found else None

    def _member(self, node: Node, scope: Scope) -> Any:
        return library.attribute(self.evaluate(node[1], scope), node[2])

    def _index(self, node: Node, scope: Scope) -> Any:
        of, at = self.evaluate(node[1], scope), self.evaluate(node[2], scope)
        if isinstance(of, dict):
            return of.setdefault(at, 0)
        if isinstance(of, Opaque) or isinstance(at, Opaque):
            return Opaque(f"{of}[{at}]")
        try:
            return of[at]
        except (IndexError, TypeError):
            raise Unreadable(f"[{at}] of {of!r:.40}") from None

    def _if(self, node: Node, scope: Scope) -> Any:
        return self.evaluate(node[2] if self.true(node[1], scope) else node[3], scope)

    def _sizeof(self, node: Node, scope: Scope) -> Any:
        text = "".join(node[1])
        value = self._name(("name", text), scope)
        return len(value) if isinstance(value, Vector) else 1

    def _construct(self, node: Node, scope: Scope) -> Any:
        return self.construct(node[1], [self.evaluate(one, scope) for one in node[2]])

    def _lambda(self, node: Node, scope: Scope) -> Any:
        return Bound(node[1], node[2], scope=scope)

    def _unary(self, node: Node, scope: Scope) -> Any:
        _, sign, inner = node
        if sign in ("++", "--"):
            return self._step(inner, 1 if sign == "++" else -1, scope)[1]
        if sign == "!":
            value = self.evaluate(inner, scope)
            if isinstance(value, Comparison):
                return Comparison(value.status, value.value, not value.equal)
            return not value
        value = self.evaluate(inner, scope)
        if sign == "*" and isinstance(value, Iterator):
            return library.elements(value.of)[value.at]
        if sign in ("&", "*", "+") or isinstance(value, Opaque):
            return value
        return -value if sign == "-" else ~value

    def _postfix(self, node: Node, scope: Scope) -> Any:
        return self._step(node[2], 1 if node[1] == "++" else -1, scope)[0]

    def _step(self, target: Node, by: int, scope: Scope) -> tuple[Any, Any]:
        before = self.evaluate(target, scope)
        after = self.operate("+", before, by)
        self.assign(target, after, scope)
        return before, after

    def _binary(self, node: Node, scope: Scope) -> Any:
        _, sign, left, right = node
        if sign == "&&":
            return self.true(left, scope) and self.true(right, scope)
        if sign == "||":
            return self.true(left, scope) or self.true(right, scope)
        return self.operate(sign, self.evaluate(left, scope), self.evaluate(right, scope))

    def operate(self, sign: str, left: Any, right: Any) -> Any:
        if isinstance(left, Status) or isinstance(right, Status):
            status, value = (left, right) if isinstance(left, Status) else (right, left)
            return Comparison(status, value, sign == "==")
        if isinstance(left, Opaque) or isinstance(right, Opaque):
            if sign in ("==", "!=") and (left is None or right is None):
                return sign == "!="  # the things of the test bench are there
            return Opaque(f"{left} {sign} {right}", (left, right))
        if sign in ("==", "!="):
            return (left == right) == (sign == "==")
        if isinstance(left, Iterator):
            other = right.at if isinstance(right, Iterator) else right
            moved = _OPERATORS[sign](left.at, other)
            return moved if isinstance(right, Iterator) else Iterator(left.of, moved)
        try:
            if sign == "<<" and not isinstance(left, int):
                return left  # a stream
            if sign == "/":
                whole = isinstance(left, int) and isinstance(right, int)
                return int(left / right) if whole else left / right
            return _OPERATORS[sign](left, right)
        except (TypeError, ZeroDivisionError):
            raise Unreadable(f"{left!r:.30} {sign} {right!r:.30}") from None

    def _assign(self, node: Node, scope: Scope) -> Any:
        _, sign, target, value_node = node
        value = copied(self.evaluate(value_node, scope))
        if sign != "=":
            value = self.operate(sign[0], self.evaluate(target, scope), value)
        self.assign(target, value, scope)
        return value

    def assign(self, target: Node, value: Any, scope: Scope) -> None:
        kind = target[0]
        if kind == "name":
            holder = scope.holder(target[1]) or self.globals.holder(target[1])
            if holder is None:
                raise Unreadable(f"{target[1]} is not declared")
            before = holder[target[1]]
            if isinstance(before, Vector) and isinstance(value, Vector):
                value = self.coerce(Type("vector", (before.of,) if before.of else ()), value)
            elif isinstance(before, Struct) and isinstance(value, Vector):
                value = self.construct(Type(before.name), list(value))
            elif isinstance(before, Shape) and isinstance(value, Vector):
                value = self.construct(Type("StorageShape"), list(value))
            holder[target[1]] = value
        elif kind == "member":
            library.set_attribute(self.evaluate(target[1], scope), target[2], value)
        elif kind == "index":
            of = self.evaluate(target[1], scope)
            at = self.evaluate(target[2], scope)
            if isinstance(of, Vector) and not (isinstance(at, int) and -len(of) <= at < len(of)):
                raise Unreadable(f"an assignment to [{at}] of {len(of)} elements")
            if not isinstance(of, Opaque):
                of[at] = self.coerce(of.of, value) if isinstance(of, Vector) and of.of else value
        elif kind == "call" and target[1][0] == "member" and target[1][2] in ("back", "front", "at"):
            at = {"back": -1, "front": 0}.get(target[1][2])
            self.evaluate(target[1][1], scope)[self.evaluate(target[2][0], scope) if at is None else at] = (
                value
            )
        elif kind == "call":  # a reference that a function returns, e.g. MutableStorageShape()
            library.replace(self.evaluate(target, scope), value)
        elif kind == "unary":
            self.assign(target[2], value, scope)
        else:
            raise Unreadable(f"an assignment to {kind}")

    def _braced(self, node: Node, scope: Scope) -> Any:
        of, values = Type(node[1][1], node[1][2]), Vector(self._values(node[2], scope))
        if of.name in library.SEQUENCES:
            return self.coerce(of, values)
        return self.construct(of, list(values))

    def _call(self, node: Node, scope: Scope) -> Any:
        _, callee, arguments = node
        if callee[0] == "member":
            of = self.evaluate(callee[1], scope)
            if isinstance(of, Struct) and (member := self.method(of.name, callee[2])):
                return self.invoke(Bound(member.parameters, member.body, of), self._values(arguments, scope))
            return library.call_method(self, of, callee[2], self._values(arguments, scope))
        if callee[0] != "name":
            return self.call(self.evaluate(callee, scope), self._values(arguments, scope))
        _, name, types, space = callee
        if special := library.SPECIAL.get(name):
            return special(self, arguments, scope)
        known = scope.holder(name) is None and (space in library.SPACES or not self._function(name, scope))
        if known and name in self.file.classes:
            return self.construct(Type(name, types), self._values(arguments, scope))
        if known and name not in self._variables:
            return library.call(self, Type(name, types), self._values(arguments, scope))
        return self.call(self._name(callee, scope), self._values(arguments, scope))

    def _values(self, nodes: Sequence[Node], scope: Scope) -> list[Any]:
        return [self.evaluate(one, scope) for one in nodes]

    def call(self, function: Any, arguments: list[Any]) -> Any:
        if isinstance(function, Bound):
            return self.invoke(function, arguments)
        if isinstance(function, Opaque):
            return library.call_opaque(self, function, arguments)
        if isinstance(function, Symbol):
            return Opaque(f"{function}()")
        raise Unreadable(f"a call of {function!r:.40}")

    def invoke(self, function: Bound, arguments: list[Any]) -> Any:
        scope = Scope(this=function.this, outer=function.scope or self.globals)
        if len(arguments) > len(function.parameters):
            raise Unreadable("an overloaded function")
        for k, (of, name, default) in enumerate(function.parameters):
            if k < len(arguments):
                value = arguments[k] if of.shared else copied(arguments[k])
            elif default is not None:
                value = self.evaluate(default, scope)
            else:
                raise Unreadable("an overloaded function")
            scope.values[name] = self.coerce(of, value)
        return self.run(function.body, scope)
