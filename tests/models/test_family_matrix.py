"""The pairwise matrix of every family: two cells here, all of it in the second tier.

The second tier writes what it found to docs/family_matrix.tsv.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from support import families, families_matrix
from support.families_matrix import WRONG

FAMILIES = families.buildable()


@pytest.mark.parametrize("family", FAMILIES)
def test_two_cells_of_a_family(family: str) -> None:
    """One in fp32 and one in 16 bits; neighbouring families have others."""
    for cell in families_matrix.sample(family, turn=FAMILIES.index(family)):
        result = families_matrix.run(cell)
        assert result.verdict != WRONG, str(result)


def test_the_design_covers_every_pair() -> None:
    factors = {"a": (1, 2, 3), "b": ("x", "y"), "c": (True, False), "d": (0,)}
    rows = list(families_matrix.covering(factors))
    for a, b in itertools.combinations(factors, 2):
        assert {(row[a], row[b]) for row in rows} == set(itertools.product(factors[a], factors[b]))
    assert len(rows) < 3 * 2 * 2


@pytest.fixture(scope="module")
def whole_run() -> Iterator[dict[str, list[str]]]:
    """Lines of every family that was run; written to the file when none is missing."""
    lines: dict[str, list[str]] = {}
    yield lines
    if set(lines) == set(FAMILIES):
        families_matrix.write(lines)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cell_of_a_family(family: str, whole_run: dict[str, list[str]]) -> None:
    cells, refused = families_matrix.cells(family)
    results = [families_matrix.run(cell) for cell in cells]
    lines = [families_matrix.not_expressible(family, *refusal) for refusal in refused.items()]
    whole_run[family] = [*map(str, results), *lines]
    wrong = [str(result) for result in results if result.verdict == WRONG]
    assert not wrong, "\n".join(wrong)
