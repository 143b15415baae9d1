"""NaN and infinities in every float argument of every op, at every instruction set."""

from __future__ import annotations

import pytest
from fuzz import nonfinite, table

pytestmark = pytest.mark.usefixtures("native_only")

CASES = 8
TIMES_MORE = 40  # in the second tier

OPS = sorted(table.load())


@pytest.mark.parametrize("name", OPS)
def test_classes_are_those_of_the_reference(name: str) -> None:
    assert nonfinite.run(name, CASES, number=1) >= CASES


@pytest.mark.full
@pytest.mark.parametrize("name", OPS)
def test_many_more(name: str) -> None:
    assert nonfinite.run(name, TIMES_MORE * CASES, number=2) >= TIMES_MORE * CASES
