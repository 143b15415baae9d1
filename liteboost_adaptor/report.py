"""What happened to every rule: outcomes, call counts, and the status made of them."""

from __future__ import annotations

import html
import json
import os
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from . import summary

#: States of an outcome, in the order they are listed.
APPLIED, PROVED, FOREIGN, REFUSED, FAILED, DISABLED, IDLE = (
    "applied",  # the body is in the catalogue and the replacement is bound
    "proved, not listed",  # bound on the evidence of its operations and a probe
    "foreign",  # another patcher owns the target; left alone
    "refused",  # it looks like a target but is not known to compute the same
    "failed",  # our own code raised; the original runs
    "disabled",  # the user turned the rule off, or the level is below the rule's
    "idle",  # nothing in any model seen so far fits the rule
)
STATES = (APPLIED, PROVED, FOREIGN, REFUSED, FAILED, DISABLED, IDLE)


class CallCounter:
    """Calls a rule really served, and those that fell back to the original, by reason."""

    __slots__ = ("calls", "fallbacks")

    def __init__(self) -> None:
        self.calls = 0
        self.fallbacks: Counter[str] = Counter()

    def count_served(self) -> None:
        """Count a call that ran on our op. Not counted while torch traces: a graph is no call."""
        if not torch.compiler.is_compiling():
            self.calls += 1

    def count_fallback(self, reason: str) -> None:
        """Count a call that took the original code, and why."""
        if not torch.compiler.is_compiling():
            self.fallbacks[reason] += 1


@dataclass(frozen=True)
class Outcome:
    """One rule met one target."""

    rule: str
    state: str
    target: str
    reason: str = ""


class Listed(NamedTuple):
    """A rule as the status lists it where nothing came of it.

    Attributes:
        state: `DISABLED` or `IDLE`.
        reason: Why it is disabled, or an empty string.
    """

    id: str
    title: str
    state: str
    reason: str = ""


@dataclass
class Row:
    """Outcomes of one rule that share state and reason, as the status lists them."""

    id: str
    title: str
    state: str
    reason: str
    targets: int
    where: list[str]
    backend: str
    calls: int
    fallbacks: dict[str, int]

    @property
    def served(self) -> str:
        """Calls and fallbacks in words."""
        if self.state in (APPLIED, PROVED) and not self.calls and not self.fallbacks:
            return "not called yet"
        return f"{self.calls} calls" + "".join(f", {n} x {why}" for why, n in self.fallbacks.items())


@dataclass
class Status:
    """A snapshot for people and programs.

    As text and in a notebook it is short: a line for each model, what is not served and why, totals. With
    ``full`` every rule has a line.

    Attributes:
        summaries: The models in short.
        missing: Why there are no kernels, and what to run, or an empty string.
        full: Whether the text lists every rule. These three are no part of the JSON.
    """

    version: str
    level: int
    native: dict[str, Any]
    environment: list[str]
    models: list[dict[str, Any]]
    rules: list[Row]
    caches_bytes: int = 0
    summaries: list[summary.ModelSummary] = field(default_factory=list)
    missing: str = ""
    full: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The snapshot as plain JSON types."""
        found = {**vars(self), "rules": [vars(row) for row in self.rules]}
        for name in ("summaries", "missing", "full"):
            del found[name]
        return found

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def lines(self) -> list[summary.Line]:
        """The snapshot in short."""
        return summary.lines(self.to_dict(), self.summaries, self.missing)

    def _repr_html_(self) -> str:
        if self.full:
            return f"<pre>{html.escape(str(self))}</pre>"
        return summary.to_html(self.lines())

    def __str__(self) -> str:
        return self._all() if self.full else summary.text(self.lines())

    def _all(self) -> str:
        lines = [
            f"liteboost_adaptor {self.version}, level {self.level}, backend {self.native.get('backend')}"
        ]
        lines += self.environment
        lines += self.native.get("npu", {}).get("lines", [])
        width = max((len(row.id) for row in self.rules), default=0)
        for row in self.rules:
            detail = f": {row.reason}" if row.reason else ""
            lines.append(
                f"  {row.id:<{width}} {row.state:<19} {row.targets:>5} targets  {row.served}{detail}"
            )
        return "\n".join(lines)


@dataclass
class Report:
    """The outcomes of this process. One instance, `report`, is shared by everyone."""

    counters: dict[str, CallCounter] = field(default_factory=dict)
    _bound: Counter[Outcome] = field(default_factory=Counter)
    _refusals: Counter[Outcome] = field(default_factory=Counter)
    _environment: list[str] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def counter(self, rule: str) -> CallCounter:
        """The counter of a rule, the same object for the life of the process."""
        with self._lock:
            return self.counters.setdefault(rule, CallCounter())

    def add(self, outcome: Outcome) -> None:
        with self._lock:
            (self._bound if outcome.state in (APPLIED, PROVED) else self._refusals)[outcome] += 1

    def remove(self, outcome: Outcome) -> None:
        """Take back what `add` noted, once its target is the original again."""
        with self._lock:
            outcomes = self._bound if outcome.state in (APPLIED, PROVED) else self._refusals
            outcomes[outcome] -= 1
            if outcomes[outcome] <= 0:
                del outcomes[outcome]

    def forget_models(self) -> None:
        """Drop what was noted of models that are gone; to be called when nothing is bound any more."""
        with self._lock:
            self._bound.clear()
            kept = {o: n for o, n in self._refusals.items() if o.rule.startswith(("catalogue", "hook."))}
            self._refusals = Counter(kept)

    def note(self, sentence: str) -> None:
        """Something about the environment the user should know, listed once."""
        with self._lock:
            if sentence not in self._environment:
                self._environment.append(sentence)

    @property
    def environment(self) -> list[str]:
        return list(self._environment)

    def rows(self, rules: Iterable[Listed], backend: str) -> list[Row]:
        """Rows for every rule in ``rules`` and every outcome."""
        titles = {rule.id: rule for rule in rules}
        with self._lock:
            outcomes = [*self._bound.items(), *self._refusals.items()]
        grouped: dict[tuple[str, str, str], list[tuple[Outcome, int]]] = {}
        for outcome, count in outcomes:
            grouped.setdefault((outcome.rule, outcome.state, outcome.reason), []).append((outcome, count))
        seen = {rule for rule, _, _ in grouped}
        for listed in titles.values():
            if listed.id not in seen:
                grouped[(listed.id, listed.state, listed.reason)] = []
        order = {rule: position for position, rule in enumerate(titles)}
        keys = sorted(grouped, key=lambda key: (order.get(key[0], len(order)), STATES.index(key[1]), key))
        return [self._row(key, grouped[key], titles, backend) for key in keys]

    def _row(
        self,
        key: tuple[str, str, str],
        group: list[tuple[Outcome, int]],
        titles: dict[str, Listed],
        backend: str,
    ) -> Row:
        rule, state, reason = key
        is_bound = state in (APPLIED, PROVED)
        counter = self.counters.get(rule, CallCounter()) if is_bound or state == IDLE else CallCounter()
        return Row(
            id=rule,
            title=titles[rule].title if rule in titles else "",
            state=state,
            reason=reason,
            targets=sum(count for _, count in group),
            where=sorted({outcome.target for outcome, _ in group}),
            backend=backend if is_bound else "",
            calls=counter.calls,
            fallbacks=dict(sorted(counter.fallbacks.items())),
        )


report = Report()
# Held through a fork: one that another thread holds at that moment would never be released in the child.
os.register_at_fork(
    before=report._lock.acquire, after_in_parent=report._lock.release, after_in_child=report._lock.release
)
