"""What bytecode says of the names that a function looks up."""

from __future__ import annotations

import math
import os
import types
from collections.abc import Callable
from typing import Any

import pytest

from liteboost_adaptor.engine.lookups import Lookups, lookups


def of(function: Callable[..., Any]) -> Lookups:
    return lookups(function.__code__)


def attributes(self: Any, x: Any) -> Any:
    y = self.norm(x).shape
    x.kept = self.weight
    return y.abs(), math.floor(1.5), os.path.sep.join(y)


def test_attributes_by_what_they_are_asked_of() -> None:
    found = of(attributes)
    assert found.paths == (("math", "floor"), ("os", "path", "sep", "join"))
    assert found.of_first == ("norm", "weight")
    assert found.of_values == ("shape", "kept", "abs")
    assert not found.operators and not found.of_super


@pytest.mark.parametrize(
    ("function", "methods"),
    [
        (lambda x, y: x + y, ("__add__", "__radd__")),
        (lambda x, y: x @ y, ("__matmul__", "__rmatmul__")),
        (lambda x, y: x // y, ("__floordiv__", "__rfloordiv__")),
        (lambda x, y: x**y, ("__pow__", "__rpow__")),
        (lambda x: -x, ("__neg__",)),
        (lambda x: +x, ("__pos__",)),
        (lambda x: ~x, ("__invert__",)),
        (lambda x: x[0], ("__getitem__",)),
        (lambda x: x[0:1], ("__getitem__",)),
        (lambda x, y: x < y, ("__lt__",)),
        (lambda x, y: x <= y, ("__le__",)),
        (lambda x, y: x == y, ("__eq__",)),
        (lambda x, y: x != y, ("__ne__",)),
        (lambda x, y: x > y, ("__gt__",)),
        (lambda x, y: x >= y, ("__ge__",)),
        (lambda x: x is None or x in [x] or not x, ()),
    ],
)
def test_operators(function: Callable[..., Any], methods: tuple[str, ...]) -> None:
    assert of(function).operators == methods


def in_place(x: Any, y: Any) -> None:
    x += y
    x[0] = y
    x[1:2] = y
    x.count -= 1
    del x[0]


def test_operators_in_place() -> None:
    found = of(in_place)
    expected = ("__iadd__", "__add__", "__radd__", "__setitem__", "__isub__", "__sub__", "__rsub__")
    assert set(found.operators) == {*expected, "__delitem__"}
    assert found.of_first[0] == "count"


def chosen(x: Any, y: Any) -> Any:
    return (x or math).floor, (os if y else math).name, (math.pi if x else y).real


def test_what_comes_from_two_places_is_a_value() -> None:
    found = of(chosen)
    # From 3.12 on what follows may be compiled once for each.
    assert {path[:2] for path in found.paths} == {("math",), ("os",), ("math", "pi")}
    assert set(found.of_values) | set(found.of_first) == {"floor", "name", "real"}


class Base:
    def forward(self, x: Any) -> Any:
        return x


class Derived(Base):
    def forward(self, x: Any) -> Any:
        return super().forward(x).next + super(Base, self).missing


def test_super() -> None:
    found = of(Derived.forward)
    assert found.of_super == ("forward",)
    assert set(found.of_values) == {"next", "missing"}


def holder(z: Any) -> Callable[..., Any]:
    def inner(self: Any, xs: Any) -> Any:
        own = xs.first

        def innermost(z: Any) -> Any:
            return z.shadowed, own.captured, self.deep

        return [self.each(x).made for x in xs if x.fits], lambda: (z.held, math.inf), innermost

    return inner


def test_functions_within_functions() -> None:
    found = of(holder(None))
    assert set(found.paths) == {("z", "held"), ("math", "inf")}
    assert set(found.of_first) == {"each", "deep"}
    assert set(found.of_values) == {"first", "made", "fits", "shadowed", "captured"}


def test_more_names_than_an_instruction_counts() -> None:
    lines = "\n".join(f"    a{n}.b{n}" for n in range(300))
    made: dict[str, Any] = {}
    exec(f"def many(x):\n{lines}\n    return x.last", made)
    found = of(made["many"])
    assert found.paths == tuple((f"a{n}", f"b{n}") for n in range(300))
    assert found.of_first == ("last",)


def test_it_is_the_code_that_counts_and_not_the_text() -> None:
    exchanged = types.FunctionType(attributes.__code__, globals())
    exchanged.__code__ = chosen.__code__
    assert of(exchanged) == of(chosen) != of(attributes)
    equal = [compile("lambda x: x.a", "one", "eval"), compile("lambda x: x.a", "another", "eval")]
    codes = [code.co_consts[0] for code in equal]
    assert lookups(codes[0]) is lookups(codes[0]) and lookups(codes[0]) == lookups(codes[1])
