"""From functions to definitions: what is remembered of them."""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import operator
import sys
import textwrap
import weakref
from pathlib import Path
from typing import Any

import pytest

from liteboost_adaptor.engine import source


def test_other_code_in_a_function_is_read_anew_and_closures_made_anew_are_not_kept() -> None:
    made = []

    def first() -> int:
        return 1

    def second() -> int:
        return 2

    def factory(value: int) -> Any:
        def closure() -> int:
            return value

        return closure

    tree = source.parse(first).node
    assert source.parse(first).node is tree
    first.__code__ = second.__code__
    assert ast.unparse(source.parse(first).node.body[0]) == "return 2"
    for value in range(3):
        closure = factory(value)
        made.append((weakref.ref(closure), source.parse(closure).node))
    del closure
    gc.collect()
    assert [kept() for kept, _ in made] == [None] * 3
    assert made[0][1] is made[2][1]


def test_the_text_of_a_function_is_what_inspect_gives_of_it() -> None:
    def factory(value: int) -> Any:
        def closure(
            x: int,  # a bracket that closes at the first indentation
        ) -> int:
            """A docstring
            of two lines."""

            return x + value  # the end

        # Of the factory, and not of what it makes.

        return closure

    # fmt: off
    def further_left() -> tuple[str]:
        return (
            "a bracket that closes at the first indentation",
    )
    # fmt: on

    for function in (factory(1), factory, further_left, source.text_of):
        assert source.text_of(function) == textwrap.dedent(inspect.getsource(function))
    changed = factory(1)
    changed.__code__ = changed.__code__.replace(co_consts=(None, 2))
    with pytest.raises(source.SourceUnavailable, match="differs from its source"):
        source.text_of(changed)


_MODULE = '''
import math
from os import (
    path,  # a comment
    sep as separator,
)


def plain(x):
    """With a docstring
of two lines."""
    # and a comment
    y = math.sqrt(x) + len(path.join(
        "a", separator,
))

    if y:
        return y
    # the last line


def imports_itself(x):
    import cmath

    return cmath.sqrt(x), path.basename(separator)


class Holder:
    @staticmethod
    def method(x):
        return path.dirname(x)
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "of_some_lines.py").write_text(_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("of_some_lines")
    del sys.modules["of_some_lines"]


@pytest.mark.parametrize("name", ["plain", "imports_itself", "Holder.method"])
def test_a_definition_is_found_by_its_indentation_alone(
    module: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = operator.attrgetter(name)(module)
    monkeypatch.setattr(inspect, "getsourcelines", None)
    node = source.parse(function).node
    whole = {each.name: each for each in ast.walk(ast.parse(_MODULE)) if isinstance(each, ast.FunctionDef)}
    assert ast.dump(node, include_attributes=True) == ast.dump(whole[node.name], include_attributes=True)


def test_code_that_is_not_its_text_is_refused_each_time_it_is_asked_for(module: Any) -> None:
    lines = Path(module.__file__).read_text().splitlines(keepends=True)
    Path(module.__file__).write_text("".join(lines).replace("if y", "if not y"))
    for _ in range(2):
        with pytest.raises(source.SourceUnavailable, match="differs from its source text"):
            source.parse(module.plain)
