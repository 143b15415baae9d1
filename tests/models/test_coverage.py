"""docs/coverage.md says what is measured; a family whose line changed needs ``make coverage``."""

from __future__ import annotations

import functools

import pytest
import transformers
from support import coverage, coverage_table, families, tiny_models

from liteboost_adaptor.huggingface.runtime import load_catalogue

ALL = [(section, family) for section in families.SECTIONS for family in families.buildable(section)]


@functools.cache
def page() -> dict[str, tuple[str, list[coverage_table.Line]]]:
    if coverage_table.version() != transformers.__version__:
        pytest.skip(
            f"docs/coverage.md is of transformers {coverage_table.version()}, not {transformers.__version__}"
        )
    return coverage_table.read()


@pytest.mark.parametrize(("section", "family"), ALL)
def test_a_family_is_served_as_its_line_says(section: str, family: str) -> None:
    written = {line.family: line for line in page()[section][1]}
    assert family in written, "no line for this family; run `make coverage`"
    model = tiny_models.build(family)
    found = coverage.measure(family, model, families.text_run(model))
    assert str(coverage_table.line(found)) == str(written[family]), "if this is meant, run `make coverage`"
    for kind in ("norm", "rope", "attention", "linear"):
        assert found.calls[kind][0] == found.tallied.get(kind, 0), f"{kind}: no original ran, nor did ours"


def test_the_page_has_every_family_and_its_own_sums() -> None:
    for section, (sums, lines) in page().items():
        assert [line.family for line in lines] == families.buildable(section)
        assert coverage_table.totals(lines) == sums, "run `make coverage`"


#: Kinds of calls -> share of the causal families that have them to be served wholly.
GOALS = {
    ("norm",): 178 / 186,
    ("rope",): 120 / 130,
    ("attention",): 1.0,
    ("gated", "experts"): 0.9,
}


@pytest.mark.parametrize("kinds", GOALS, ids=" or ".join)
def test_nearly_all_families_are_served_wholly(kinds: tuple[str, ...]) -> None:
    having = [line for line in page()[families.CAUSAL][1] if line.has(*kinds)]
    assert len(having) > 100
    assert sum(line.is_whole(*kinds) for line in having) >= GOALS[kinds] * len(having)


def test_every_rule_serves_some_family_or_says_why_it_is_kept() -> None:
    lines = [line for _, some in page().values() for line in some]
    idle = coverage_table.idle_rules(lines)
    assert sorted(idle) == sorted(coverage_table.KEPT_RULES), "rules that serve nothing"
    assert set(idle) <= {rule.id for rule in load_catalogue(())[0]}
