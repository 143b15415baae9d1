"""From functions to definitions: what is remembered of them."""

from __future__ import annotations

import ast
import gc
import weakref
from typing import Any

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
