"""One suite, without the package and at each level, and what differs."""

from __future__ import annotations

from collections.abc import Iterable

from . import sources
from .compare import settle
from .run import Broken, Run, run
from .suites import Suite
from .table import Entry


def check(suite: Suite, levels: Iterable[int], *, reuse: bool = False) -> Entry:
    """Run ``suite`` every way; where its tests cannot be had, the entry says what was tried.

    ``reuse`` takes the records of earlier runs that came to their end.

    Raises:
        Broken: A run did not come to its end, or no test passes without the package.
    """
    try:
        tree = suite.tree()
    except sources.Unavailable as fault:
        return Entry(suite.name, unavailable=str(fault))
    without = run(suite, tree, None, reuse=reuse)
    if not without.count("passed"):
        raise Broken(f"no test of {suite.name} passes without the package: {without.failures}")
    entry = Entry(suite.name, tree.origin, runs={None: without})

    def again(level: int | None, seed: int, tests: list[str]) -> Run:
        return run(suite, tree, level, seed=seed, tests=tests)

    for level in levels:
        entry.runs[level] = run(suite, tree, level, reuse=reuse)
        entry.verdicts[level] = settle(without, entry.runs[level], again)
    return entry
