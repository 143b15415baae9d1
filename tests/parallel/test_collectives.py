"""Collectives as ops: exact to rounding, the same bits on every rank, bounded waits with a reason."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from parallel import ranks

pytestmark = pytest.mark.usefixtures("native_only")


@functools.cache
def of_two_ranks() -> list[dict[str, Any]]:
    """What each of two ranks found, by one start of them."""
    return ranks.run(2, "parallel.jobs_ops:two_ranks")


def check_sums(found: dict[str, Any], size: int) -> None:
    assert found.pop("shared")
    assert len(found) == 30
    for case, (ulps, same) in found.items():
        # Of what is rounded: 16 bits once through memory, everything else after each addition.
        assert ulps <= (0.51 if case.startswith("shared") and "float32" not in case else size) and same, case


def test_sums_through_shared_memory_and_through_the_group() -> None:
    for found in of_two_ranks():
        check_sums(dict(found["sums"]), 2)


@pytest.mark.full
def test_sums_of_three_ranks() -> None:
    for found in ranks.run(3, "parallel.jobs_ops:sums"):
        check_sums(found, 3)


def test_shapes_strides_and_refusals() -> None:
    for found in (each["details"] for each in of_two_ranks()):
        assert found["strided"] and found["contiguous"] and found["input_kept"] and found["gathered"]
        assert found["in place"]
        assert found["gathered in pieces"] == [True] * 3
        assert found["empty"] == [0, 3] and found["meta"] == [2, 12]
        assert "requires grad" in found["grad"]
        assert "float64" in found["dtype"] or "double" in found["dtype"].lower()
        assert "elements in its last dimension" in found["sizes"]


def test_tensors_of_different_sizes_are_an_error_on_every_rank() -> None:
    for found in of_two_ranks():
        assert "every rank must run the same model on the same inputs" in found["other sizes"]


def test_a_rank_that_ends_is_noticed_at_once() -> None:
    done = ranks.finish(ranks.start(3, "parallel.jobs_ops:one_ends"), timeout=120)
    assert [code for code, _ in done] == [0, 0, 0], done
    for rank in (0, 2):
        found = ranks.result(done[rank][1])
        assert "rank 1 (process " in found["text"] and "has ended" in found["text"]
        assert found["seconds"] < 30
