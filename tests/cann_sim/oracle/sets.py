"""Parameter sets of a file of unit tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import tables
from .bench import Bench
from .expressions import Scope
from .interpreter import REPEATED, Interpreter
from .statements import Test, file_of
from .syntax import Type
from .tokens import Unreadable
from .values import ParameterSet, Struct

#: what Python raises where a value of the test is not what it was taken for
_CONFUSED = (ArithmeticError, LookupError, TypeError, ValueError, AttributeError)


def sets_of(
    text: str, path: str, read: Callable[[str], str | None]
) -> tuple[list[ParameterSet], list[tuple[str, str]]]:
    """The calls that the tests in ``text`` make, and the tests that cannot be followed with the reason.

    ``read`` gives the text of a table by the name a test opens it with. A test that checks the same arguments
    again (in threads) adds nothing.
    """
    file = file_of(text)
    bench = Bench(path, read)
    run = Interpreter(file, bench)
    failures: list[tuple[str, str]] = []
    for test in file.tests:
        for name, hints, value in _instances(run, test, failures):
            bench.start(name, *hints, path)
            run.globals.values["GetParam()"] = value
            before = len(bench.sets)
            reason = _follow(run, test)
            # What was called and compared before the test became unreadable still counts.
            bench.sets[before:] = [one for one in bench.sets[before:] if not reason or one.expected]
            if reason and reason != REPEATED and len(bench.sets) == before:
                failures.append((name, reason))
    return _distinct(bench.sets), failures


def _follow(run: Interpreter, test: Test) -> str:
    """Runs the body of a test; why it cannot be followed to its end, or nothing."""
    run.restart()
    try:
        fixture = (
            run.construct(Type(test.suite), []) if test.suite in run.file.classes else Struct(test.suite)
        )
        run.run(test.body, Scope(this=fixture, outer=run.globals))
    except Unreadable as reason:
        return str(reason)
    except _CONFUSED as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _instances(
    run: Interpreter, test: Test, failures: list[tuple[str, str]]
) -> list[tuple[str, list[str], Any]]:
    name = f"{test.suite}.{test.name}"
    if test.suite not in run.file.instances:
        return [(name, [test.name, test.suite], None)]
    found = []
    for node in run.file.instances[test.suite]:
        try:
            values = list(run.evaluate(node, run.globals))
        except (Unreadable, *_CONFUSED) as reason:
            failures.append((name, f"its parameters: {reason}"))
            continue
        for k, value in enumerate(values):
            label = _label(value) or str(k)
            found.append((f"{name}/{label}", [label, test.name, test.suite], value))
    return found


def _label(value: Any) -> str:
    """What a parameter calls itself: its first string."""
    if isinstance(value, tables.Row):
        return next(iter(value.columns.values()), "")
    fields = value.fields if isinstance(value, Struct) else {}
    for key in ("caseName", "case_name", "prefix"):
        if isinstance(fields.get(key), str):
            return fields[key]
    return next((one for one in fields.values() if isinstance(one, str)), "")


def _distinct(sets: list[ParameterSet]) -> list[ParameterSet]:
    found: dict[str, ParameterSet] = {}
    for one in sets:
        found.setdefault(
            repr((one.operator, one.soc, one.arguments, one.inputs, one.outputs, one.attributes)), one
        )
    return list(found.values())
