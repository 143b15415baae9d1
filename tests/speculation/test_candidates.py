"""The index against a search through the whole text, and how many candidates a step gets."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liteboost_adaptor.huggingface.speculation import ngrams, pace
from liteboost_adaptor.huggingface.speculation.ngrams import BOUNDARY, SIZES, NgramIndex
from liteboost_adaptor.huggingface.speculation.pace import LENGTHS, Pace


def searched(text: list[int], count: int) -> list[int]:
    """As `NgramIndex.following`, by looking at every place of the text."""
    for size in SIZES:
        last = text[len(text) - size :]
        starts = [at for at in range(size, len(text)) if len(text) > size and text[at - size : at] == last]
        if starts:
            start, longer = starts[-1], list(text)
            for _ in range(count):
                longer.append(longer[start + len(longer) - len(text)])
            found = longer[len(text) :]
            return found[: found.index(BOUNDARY)] if BOUNDARY in found else found
    return []


@given(
    parts=st.lists(st.lists(st.integers(BOUNDARY, 4), max_size=12), min_size=1, max_size=8),
    count=st.integers(1, 15),
)
def test_the_index_finds_what_a_search_finds(parts: list[list[int]], count: int) -> None:
    index, text = NgramIndex(), []
    for part in parts:
        index.extend(part)
        text += part
        assert index.following(count) == searched(text, count)
        assert index.tokens == text


def test_nothing_follows_where_nothing_repeats() -> None:
    index = NgramIndex()
    index.extend(range(100))
    assert index.following(15) == []


def test_the_last_place_and_the_longer_run_count() -> None:
    index = NgramIndex()
    index.extend([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3])
    assert index.following(2) == [4, 9], "three tokens before two"
    index.extend([8, 2, 3])
    assert index.following(1) == [8], "of two tokens the last place"


def test_a_text_that_goes_round_is_followed() -> None:
    index = NgramIndex()
    index.extend([5, 6, 7, 5, 6, 7])
    assert index.following(7) == [5, 6, 7, 5, 6, 7, 5]


def test_candidates_end_where_a_text_ends() -> None:
    index = NgramIndex()
    index.extend([1, 2, 3, BOUNDARY, 1, 2])
    assert index.following(9) == [3]


def test_a_token_more_costs_as_much_in_a_long_text() -> None:
    """As many lines of the interpreter run, however long it is."""

    def lines(length: int) -> int:
        index, count = NgramIndex(), 0
        index.extend([at * 7919 % 50021 for at in range(length)])

        def trace(frame: Any, event: str, argument: object) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            index.extend([50022])
            index.following(15)
        finally:
            sys.settrace(before)
        return count

    assert 0 < lines(32768) == lines(64)


def test_candidates_grow_while_they_are_accepted_and_shrink_when_not() -> None:
    found = Pace()
    seen = []
    for length in range(4):
        seen.append(found.candidates(length))
        found.judge(seen[-1], seen[-1], length)
    assert seen == [3, 7, 15, 15]
    found.judge(15, 7, 5)
    assert found.candidates(5) == 7
    found.judge(7, 4, 6)
    assert found.candidates(6) == 7, "more than half"
    found.judge(2, 2, 7)
    assert found.candidates(7) == 7, "no more were found: that says nothing of longer ones"


def test_it_pauses_when_it_does_not_pay_and_tries_again() -> None:
    found, length, checked, begins = Pace(), 0, 0, []
    while length < 4000:
        count = found.candidates(length)
        length += 1
        if count:
            found.judge(count, 0, length)
            checked += count
            if not found.candidates(length):
                begins.append((length, found.resumes_at - length))
    pauses = [pause for _, pause in begins]
    assert pauses[:6] == [16, 32, 64, 128, 256, 512] and set(pauses[6:]) == {512}
    assert checked * pace.COST_OF_TOKEN < 8, "of 4000 tokens"


def test_it_pays_again_after_a_pause() -> None:
    found = Pace()
    for length in range(100):
        if count := found.candidates(length):
            found.judge(count, 0, length)
    assert found.pause > pace.FIRST_PAUSE
    for length in range(found.resumes_at, found.resumes_at + 8):
        found.judge(found.candidates(length), found.candidates(length), length)
    assert found.pause == pace.FIRST_PAUSE and found.candidates(10**6) == LENGTHS[-1]


def test_what_costs_more_must_be_accepted_more_often() -> None:
    """A draft model that costs half a step a candidate."""
    cheap, dear = Pace(), Pace(cost=0.5)
    for length in range(12):
        for each in (cheap, dear):
            each.judge(3, 1, length)
    assert cheap.resumes_at == 0 and dear.resumes_at > 0


def test_a_small_model_pays_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert pace.step_cost(14 << 20) > 1 and pace.step_cost(1 << 30) < 0.02
    small, large = Pace(step=pace.step_cost(14 << 20)), Pace(step=pace.step_cost(1 << 30))
    for length in range(4):
        for each in (small, large):
            each.judge(3, 1, length)
    assert small.resumes_at > 0 and large.resumes_at == 0


def test_the_docs_name_the_constants() -> None:
    assert LENGTHS == (1, 3, 7, 15) and ngrams.SIZES == (3, 2) and pace.COST_OF_TOKEN == 0.1
