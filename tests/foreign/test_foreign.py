"""Other projects' tests fail with this package only where they fail without it (docs/foreign_tests.md)."""

from __future__ import annotations

import importlib.util

import pytest

from foreign.check import check
from foreign.suites import SUITES, Suite

pytestmark = pytest.mark.full

NEEDED = ("attr", "datasets", "diffusers", "httpx", "parameterized", "scipy", "xdist", "yaml")
AT_LEAST = 500

_ran: dict[str, int] = {}


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_failures_are_those_without_us(suite: Suite):
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: pip install -r tests/foreign/requirements.txt")
    entry = check(suite, [1, 2], reuse=True)
    if entry.unavailable:
        pytest.skip(entry.unavailable)
    _ran[suite.name] = entry.runs[2].count("passed", "failed")
    assert not entry.ours
    for level in (1, 2):
        assert sum(entry.runs[level].served.values()) > 0


def test_that_is_not_few():
    if not _ran:
        pytest.skip("no suite was run")
    assert sum(_ran.values()) >= AT_LEAST
