"""What became of requests to a server, and of the server."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .plan import Planned


@dataclass
class Accounts:
    """What became of the requests.

    Attributes:
        right: Number of those answered as planned, by kind.
        faults: The others, with what was wrong.
        memory: Resident bytes of the server behind each request.
        before, after: Threads and descriptors behind the first requests, and behind the last.
        seconds: How long the requests took.
        exit_status: Of the server, behind SIGTERM.
    """

    right: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[Planned, str]] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    exit_status: int | None = None

    @property
    def growth(self) -> float:
        """By what part the server's memory in the last tenth is above that in the second."""
        tenth = len(self.memory) // 10
        return statistics.mean(self.memory[-tenth:]) / statistics.mean(self.memory[tenth : 2 * tenth]) - 1

    def add(self, request: Planned, fault: str) -> None:
        if fault:
            self.faults.append((request, fault))
        else:
            self.right[request.kind] += 1

    def lines(self) -> list[str]:
        wrong = Counter(request.kind for request, _ in self.faults)
        kinds = sorted({*self.right, *wrong})
        return [
            f"{'requests':16}{'as planned':>12}{'not':>6}",
            *(f"{kind:16}{self.right[kind]:12}{wrong[kind]:6}" for kind in kinds),
            *(f"  {request.kind} {request.number}: {fault}" for request, fault in self.faults[:20]),
            f"{self.seconds:.0f} s, {len(self.memory) / self.seconds:.1f} requests a second",
            f"memory: {self.memory[-1] / 2**20:.0f} MiB, last tenth {self.growth:+.2%} of the second",
            f"before: {self.before}, after: {self.after}, exit status {self.exit_status}",
        ]


@dataclass(frozen=True)
class StepCounts:
    """Decode steps of a server: made by programs, and by the original, with why."""

    served: int
    fallbacks: dict[str, int]


def steps(status: dict[str, Any]) -> StepCounts:
    """What a status says of decode steps."""
    (found,) = (rule for rule in status["rules"] if rule["id"] == "step.program")
    return StepCounts(found["calls"], found["fallbacks"])
