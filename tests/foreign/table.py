"""The result as a Markdown document."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from .compare import RERUNS, Verdict
from .run import Run

HEADING = """# Tests of other projects

Written by `make foreign`; not edited by hand.

Tests that other projects wrote for themselves, run without this package and with it. They
are fetched when they are run and are not part of this repository: PEFT's, and those that all models of
transformers share, come from source distributions; the models' own, and those of generation, from a checkout
named by `TRANSFORMERS_SOURCE`, else from a clone of the tag. A checkout of another version is run in its own
transformers. Hub models that tests load are tiny local ones under the same names, in every run: what expects
the text of the real ones fails with us and without. Every test begins with the same seed in every run.

A test *failed with us* when it fails with the package and not without it, or does not run with it and does
without. Such a test is run {reruns} more times both ways, with other seeds; it is *unstable* when it fails
without the package too, and else a mistake of ours.

`make foreign` runs all of it (TRANSFORMERS_SOURCE=folder for a checkout, FOREIGN_ARGS for suites and options;
`--help` lists them, 80 more families among them) and writes this document.
"""


@dataclass
class Entry:
    """What became of one suite: its runs by level, and what differs; or why it was not run."""

    suite: str
    origin: str = ""
    unavailable: str = ""
    runs: dict[int | None, Run] = field(default_factory=dict)
    verdicts: dict[int, list[Verdict]] = field(default_factory=dict)

    @property
    def ours(self) -> list[tuple[int, Verdict]]:
        """Failures that are ours, with the level."""
        return [(level, v) for level, verdicts in self.verdicts.items() for v in verdicts if v.is_ours]


def document(entries: Iterable[Entry]) -> str:
    entries = list(entries)
    lines = [HEADING.format(reruns=RERUNS), _versions(), *_codes(entries), *_absent(entries), ""]
    lines += [
        "| suite | package | run | passed | failed | skipped | failed with us | unstable | calls served |"
    ]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for entry in entries:
        lines += [_row(entry, level, run) for level, run in entry.runs.items()]
    lines += [_total(entries, level) for level in _levels(entries)]
    lines += ["", "## Where the tests are from", ""]
    lines += [f"- `{entry.suite}`: {entry.origin or 'not run, ' + entry.unavailable}" for entry in entries]
    lines += ["", "## Failures", ""]
    lines += [line for entry in entries for line in _failures(entry)] or ["None."]
    return "\n".join(lines) + "\n"


def _versions() -> str:
    names = ("torch", "transformers", "peft", "accelerate")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names) + "."


def _codes(entries: list[Entry]) -> list[str]:
    """A line for each state of the package that was run, with the runs where there are several."""
    runs: dict[str, list[str]] = {}
    for entry in entries:
        for level, run in entry.runs.items():
            if level is not None:
                runs.setdefault(run.code, []).append(f"{entry.suite} {_name(level)}")
    if len(runs) == 1:
        return [f"This package: {code}." for code in runs]
    return [f"This package: {code} for {', '.join(names)}." for code, names in runs.items()]


def _absent(entries: list[Entry]) -> list[str]:
    """A line with the runs that other suites have and a suite has not."""
    levels = _levels(entries)
    absent = [
        f"{e.suite} {_name(level)}" for e in entries if e.runs for level in levels if level not in e.runs
    ]
    return [f"Not run yet: {', '.join(absent)}."] if absent else []


def _levels(entries: list[Entry]) -> list[int | None]:
    return list(dict.fromkeys(level for entry in entries for level in entry.runs))


def _name(level: int | None) -> str:
    return "without" if level is None else f"level {level}"


def _row(entry: Entry, level: int | None, run: Run) -> str:
    counts = [run.count("passed", "failed"), run.count("passed"), run.count("failed"), run.count("skipped")]
    verdicts = entry.verdicts.get(level, []) if level is not None else []
    ours = sum(v.is_ours for v in verdicts)
    differs = ["", ""] if level is None else [str(ours), str(len(verdicts) - ours)]
    served = "" if level is None else f"{sum(run.served.values())}"
    return f"| {' | '.join([entry.suite, _name(level), *map(str, counts), *differs, served])} |"


def _total(entries: list[Entry], level: int | None) -> str:
    total = Run(level, {})
    verdicts: list[Verdict] = []
    for entry in entries:
        if level in entry.runs:
            run = entry.runs[level]
            total.results |= {f"{entry.suite} {test}": result for test, result in run.results.items()}
            total.served += run.served
            verdicts += entry.verdicts.get(level, []) if level is not None else []
    return _row(Entry("**all**", verdicts={level: verdicts}), level, total)


def _failures(entry: Entry) -> list[str]:
    """Every test that fails in any run, with the runs it fails in and why."""
    tests = sorted(set().union(*(run.failures for run in entry.runs.values()))) if entry.runs else []
    lines = []
    for test in tests:
        where = [_name(level) for level, run in entry.runs.items() if test in run.failures]
        reason = next(run.results[test].reason for run in entry.runs.values() if test in run.failures)
        lines.append(f"- {entry.suite} `{test.split('::', 1)[-1]}` ({', '.join(where)}): {_plain(reason)}")
    for level, verdicts in entry.verdicts.items():
        for v in verdicts:
            said = "**ours**" if v.is_ours else "unstable"
            lines.append(
                f"- {entry.suite} `{v.test.split('::', 1)[-1]}` at level {level}: {said}; of {RERUNS} more "
                f"runs {v.without} did not pass without the package, {v.with_us} with it: {_plain(v.reason)}"
            )
    return lines


def _plain(reason: str) -> str:
    """Short, and without what Markdown would take for itself or what names a machine."""
    short = re.sub(r"https?://[^\s']+", "the hub", reason)[:160]
    return short.translate(str.maketrans("`|<>", "'/()"))
