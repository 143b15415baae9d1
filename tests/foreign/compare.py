"""Failures with the package must be among the failures without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .run import Run

RERUNS = 5


@dataclass(frozen=True)
class Verdict:
    """A test that went worse with the package, run again with other seeds both ways.

    Attributes:
        test: Its node id.
        reason: Its failure with the package.
        without, with_us: In how many of ``RERUNS`` runs it did not pass.
    """

    test: str
    reason: str
    without: int
    with_us: int

    @property
    def is_ours(self) -> bool:
        """It always passes without the package, or clearly more often; else it is unstable by itself."""
        return self.without == 0 or self.with_us - self.without > 2


def differences(without: Run, with_us: Run) -> list[str]:
    """Tests that went worse with the package: failed where they had not, or did not run where they had."""
    lost = without.ran - with_us.ran
    return [*sorted(with_us.failures - without.failures), *sorted(lost)]


def settle(without: Run, with_us: Run, again: Callable[[int | None, int, list[str]], Run]) -> list[Verdict]:
    """Run what differs again, in both ways and with the same seeds; ``again(level, seed, tests)`` runs it."""
    tests = differences(without, with_us)
    if not tests:
        return []
    failed = {None: dict.fromkeys(tests, 0), with_us.level: dict.fromkeys(tests, 0)}
    for seed in range(1, RERUNS + 1):
        for level, counts in failed.items():
            results = again(level, seed, tests).results
            for test in tests:
                counts[test] += test not in results or results[test].outcome != "passed"
    return [
        Verdict(test, _reason(with_us, test), failed[None][test], failed[with_us.level][test])
        for test in tests
    ]


def _reason(run: Run, test: str) -> str:
    return run.results[test].reason if test in run.results else "not run"
