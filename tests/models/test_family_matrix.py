"""The pairwise matrix of every family; docs/family_matrix.tsv holds what the last whole run found."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
from support import families, families_matrix
from support.families_matrix import WRONG, Result

FAMILIES = families.buildable()


@functools.cache
def written() -> dict[str, list[Result]]:
    return families_matrix.read()


@pytest.mark.parametrize("family", FAMILIES)
def test_some_cells_of_a_family(family: str) -> None:
    """Two of the design, one in fp32 and one in 16 bits; neighbouring families have others."""
    results = written()[family]
    turn = FAMILIES.index(family)
    for is_fp32 in (True, False):
        cells = [result.cell for result in results if (result.cell.dtype == "fp32") == is_fp32]
        result = families_matrix.run(cells[turn % len(cells)])
        assert result.verdict != WRONG, str(result)


def test_the_file_has_every_family_and_no_wrong_cell() -> None:
    assert list(written()) == FAMILIES
    wrong = [str(result) for results in written().values() for result in results if result.verdict == WRONG]
    assert not wrong, "\n".join(wrong)


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
    whole_run[family] = [
        *map(str, results),
        *(families_matrix.not_expressible(family, *r) for r in refused.items()),
    ]
    wrong = [str(result) for result in results if result.verdict == WRONG]
    assert not wrong, "\n".join(wrong)
