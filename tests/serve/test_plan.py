"""The soak's own arithmetic: what is planned, and how it is counted. The soak itself is `test_serve.py`."""

from __future__ import annotations

from collections import Counter

import pytest

from serve import plan
from serve.accounts import Accounts, steps


def test_a_plan_has_the_share_of_each_kind_and_is_drawn_by_its_seed() -> None:
    texts = plan.prompts(16, 3)
    requests = plan.planned(2000, 3, texts)
    kinds = Counter(request.kind for request in requests)
    assert kinds[plan.CANCELLED] == 100 and kinds[plan.MALFORMED] == 40 and kinds[plan.OVER] == 20
    assert kinds[plan.GREEDY] == 2000 - sum(round(share * 2000) for share in plan.SHARES.values())
    assert requests == plan.planned(2000, 3, texts) != plan.planned(2000, 4, texts)
    assert all(request.tokens == plan.UNWANTED for request in requests if request.kind == plan.CANCELLED)
    # A few requests have each kind, too.
    assert set(Counter(request.kind for request in plan.planned(20, 3, texts))) == set(kinds)


def test_growth_is_that_of_the_last_tenth_over_the_second() -> None:
    accounts = Accounts(memory=[1] * 10 + [200] * 10 + [900] * 70 + [204] * 10)
    assert accounts.growth == pytest.approx(0.02)


def test_what_went_wrong_is_counted_and_shown() -> None:
    accounts = Accounts(seconds=2.0, memory=[1] * 20)
    requests = plan.planned(10, 3, ["a"])
    for request in requests:
        accounts.add(request, "no answer" if request.kind == plan.IMAGE else "")
    (wrong,) = (request for request in requests if request.kind == plan.IMAGE)
    assert accounts.faults == [(wrong, "no answer")] and accounts.right.total() == 9
    assert f"  image {wrong.number}: no answer" in accounts.lines()


def test_decode_steps_of_a_status() -> None:
    rules = [{"id": "norm.rms", "calls": 3}, {"id": "step.program", "calls": 7, "fallbacks": {"recorded": 1}}]
    found = steps({"rules": rules})
    assert (found.served, found.fallbacks) == (7, {"recorded": 1})
