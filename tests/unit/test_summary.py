"""The status in short: models, what is not served and why, totals; as text and as HTML."""

from __future__ import annotations

import re
from typing import Any

import pytest

from liteboost_adaptor import summary
from liteboost_adaptor.report import DISABLED, IDLE, Listed, Outcome, Report, Status
from liteboost_adaptor.summary import ModelSummary

LLAMA = ModelSummary("LlamaForCausalLM", 23, {"norm.rms": 9, "norm.residual": 4, "attention.sdpa": 4})
REFUSED = ("rope.half", "rotate_half is not known")


def status(*outcomes: Outcome, listed: tuple[Listed, ...] = (), **changes: Any) -> Status:
    """One of a process in which ``outcomes`` came of rules, with calls of the first."""
    found = Report()
    for outcome in outcomes:
        found.add(outcome)
    if outcomes:
        found.counter(outcomes[0].rule).calls = 1234
    given: dict[str, Any] = {
        "version": "1.2.3",
        "level": 2,
        "native": {"backend": "native", "isa": "avx2", "library": "_C.so", "reason": None},
        "environment": [],
        "models": [],
    }
    return Status(**{**given, "rules": found.rows(listed, "native"), **changes})


APPLIED = Outcome("norm.rms", "applied", "a:B")


def test_a_model_that_is_served_is_a_line() -> None:
    text = str(status(APPLIED, summaries=[LLAMA], caches_bytes=3 << 20))
    assert text.splitlines() == [
        "liteboost_adaptor 1.2.3, level 2, kernels: native (avx2)",
        "  LlamaForCausalLM  23 modules served: attention, norm",
        "  calls             1,234 served; none ran the original; 3.0 MiB in caches of ours",
    ]


def test_what_of_a_model_is_not_served_stands_below_it_with_the_reason() -> None:
    model = ModelSummary("HouseForCausalLM", 1, {"norm.rms": 1}, {REFUSED: 4})
    text = str(status(APPLIED, Outcome(REFUSED[0], "refused", "a:C", REFUSED[1]), summaries=[model]))
    assert text.splitlines()[1:3] == [
        "  HouseForCausalLM  1 module served: norm",
        "    not served      rope.half on 4 targets: rotate_half is not known",
    ]
    assert text.count(REFUSED[1]) == 1


def test_what_was_refused_of_models_that_are_gone_is_said_all_the_same() -> None:
    text = str(status(Outcome(REFUSED[0], "refused", "a:C", REFUSED[1])))
    assert re.search(r"\n  refused +rope.half on 1 target: rotate_half is not known\n", text)


def test_what_serves_no_single_module_is_named_by_its_rule() -> None:
    found = status(APPLIED, Outcome("attention.sparse", "applied", "a:C"), summaries=[LLAMA])
    assert "\n  also applied      attention.sparse 1\n" in str(found)


def test_a_model_without_anything_of_ours_says_why() -> None:
    text = str(status(summaries=[ModelSummary("GPT", 0, reason="level 0")]))
    assert "\n  GPT    original code: level 0\n" in text


def test_missing_kernels_are_named_with_what_to_run() -> None:
    text = str(status(native={"backend": "reference"}, missing="no compiler. To compile: do it"))
    assert text.splitlines()[:2] == [
        "liteboost_adaptor 1.2.3, level 2, kernels: none",
        "  kernels  no compiler. To compile: do it",
    ]


def test_reasons_of_calls_that_ran_the_original_are_counted() -> None:
    found = status(APPLIED)
    found.rules[0].fallbacks = {"grad mode": 1000}
    assert "1,234 served; 1,000 ran the original: grad mode" in str(found)
    found.rules[0].fallbacks = {f"reason {number}": number for number in range(1, 7)}
    said = re.sub(r"\s+", " ", str(found))
    named = ", ".join(f"{number} x reason {number}" for number in (6, 5, 4, 3))
    assert f"21 ran the original: {named}, and 2 more reasons" in said


def test_idle_rules_are_listed_on_request_alone() -> None:
    listed = (Listed("norm.layer", "LayerNorm", IDLE), Listed("norm.rms", "RMSNorm", IDLE))
    found = status(APPLIED, listed=listed)
    assert "norm.layer" not in str(found)
    found.full = True
    assert re.search(r"^  norm.layer +idle +0 targets", str(found), re.M)


def test_rules_that_are_turned_off_are_counted_by_reason_and_listed_on_request() -> None:
    old = "requires transformers>=5.3, found 4.57.1"
    listed = tuple(Listed(f"norm.{number}", "", DISABLED, old) for number in range(3))
    listed += (Listed("rope.half", "", DISABLED, "turned off by LITEBOOST_DISABLE=rope.*"),)
    found = status(listed=listed)
    assert str(found).splitlines()[-2:] == [
        f"  disabled  3 rules: {old}",
        "            1 rule: turned off by LITEBOOST_DISABLE=rope.*",
    ]
    assert {rule["reason"] for rule in found.to_dict()["rules"] if rule["id"] == "norm.1"} == {old}
    found.full = True
    assert re.search(rf"norm.1 +disabled .*: {old}", str(found))


def test_many_reasons_are_cut_and_counted() -> None:
    refused = {("rope.half", f"reason {number}"): 1 for number in range(6)}
    text = str(status(summaries=[ModelSummary("House", 1, {"norm.rms": 1}, refused)]))
    assert "reason 3" in text and "reason 4" not in text and "and 2 more" in text


@pytest.mark.parametrize("width", [60, summary.WIDTH])
def test_no_row_is_wider_than_it_may_be(width: int) -> None:
    why = "is of a kind that " * 30
    model = ModelSummary(
        "AClassWithANameThatIsLongerThanMostOfThem", 7, {"norm.rms": 1}, {("rope.half", why): 1}
    )
    found = status(APPLIED, summaries=[model], missing=why, environment=[why])
    found.rules[0].fallbacks = {why: 1}
    assert max(len(row) for row, _ in summary.rows(found.lines(), width)) <= width
    assert max(map(len, str(found).splitlines())) <= summary.WIDTH


def test_in_a_notebook_it_is_a_short_table_of_the_same_words() -> None:
    model = ModelSummary("House", 1, {"norm.rms": 1}, {("rope.half", "a < b & c"): 1})
    found = status(APPLIED, summaries=[LLAMA, model])
    html = found._repr_html_()
    assert html.startswith("<table>") and html.endswith("</table>") and len(html) < 2000
    assert "a &lt; b &amp; c" in html and "23 modules served: attention, norm" in html
    found.full = True
    assert found._repr_html_().startswith("<pre>liteboost_adaptor 1.2.3")


def test_json_has_what_programs_read_and_no_more() -> None:
    keys = {"version", "level", "native", "environment", "models", "rules", "caches_bytes"}
    assert status(APPLIED, summaries=[LLAMA], missing="x", full=True).to_dict().keys() == keys
