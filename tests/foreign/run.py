"""Run a suite without this package or at one of its levels, and read what became of each test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from support import processes

from . import sources, stand_ins
from .suites import Suite

TIMEOUT = 3600  # seconds a run


@dataclass(frozen=True)
class Result:
    """One test: ``passed``, ``failed`` or ``skipped``, why, and the calls our ops served meanwhile."""

    outcome: str
    reason: str = ""
    served: int = 0


@dataclass
class Run:
    """One run of a suite. ``level`` is None without the package; ``code`` says which code was run."""

    level: int | None
    results: dict[str, Result]
    served: Counter[str] = field(default_factory=Counter)
    code: str = "commit unknown"

    def count(self, *outcomes: str) -> int:
        return sum(result.outcome in outcomes for result in self.results.values())

    @property
    def ran(self) -> set[str]:
        return {test for test, result in self.results.items() if result.outcome != "skipped"}

    @property
    def failures(self) -> set[str]:
        return {test for test, result in self.results.items() if result.outcome == "failed"}


class Broken(Exception):
    """A run did not come to its end, or ran what it should not have."""


def run(
    suite: Suite,
    tree: sources.Tree,
    level: int | None,
    *,
    seed: int = 0,
    tests: Iterable[str] = (),
    reuse: bool = False,
) -> Run:
    """Run ``suite``, or only its ``tests``, in a process of its own.

    ``reuse`` takes the record of an earlier whole run that came to its end, where there is one.

    Raises:
        Broken: The process neither finished nor crashed in a test, or the package was imported in a run
            without it, or not in a run with it.
    """
    tests = list(tests)
    name = f"{suite.name}-{'without' if level is None else level}"
    record = sources.WORK / "records" / f"{name}{'-again' if tests else ''}.jsonl"
    log = record.with_suffix(".log")
    if reuse and not tests and record.exists() and '"finished"' in record.read_text():
        return read(record.read_text().splitlines(), level, 0)
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text("")
    command = [sys.executable, "-m", "pytest", "-c", str(_settings()), "--rootdir", str(tree.folder), "-q"]
    command += ["-p", "no:randomly", "-p", "no:cacheprovider", "-p", "foreign.plugin"]
    command += tests or list(suite.arguments)
    with log.open("w") as output:
        done = subprocess.run(
            command,
            cwd=tree.folder,
            env=_environment(level, seed, record, tree.packages),
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT,
            check=False,
        )
    return read(record.read_text().splitlines(), level, done.returncode, str(log))


def _settings() -> Path:
    """An empty pytest.ini: what other projects set for their own tests is for their own machines."""
    path = sources.WORK / "pytest.ini"
    path.write_text("[pytest]\n")
    return path


def _environment(level: int | None, seed: int, record: Path, packages: Path | None) -> dict[str, str]:
    variables = {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(stand_ins.make_cache(sources.WORK / "hub")),
        "TOKENIZERS_PARALLELISM": "false",
        "FOREIGN_RECORD": str(record),
        "FOREIGN_SEED": str(seed),
        "FOREIGN_CODE": sources.code_under_test(),
    }
    if level is not None:
        variables["LITEBOOST_LEVEL"] = str(level)
    if packages is not None:
        variables["PYTHONPATH"] = os.pathsep.join([str(packages), processes.environment()["PYTHONPATH"]])
    return processes.environment(**variables)


def read(lines: list[str], level: int | None, status: int, log: str = "") -> Run:
    """The run that the plugin's ``lines`` tell of; a test that took the process down has failed."""
    results: dict[str, Result] = {}
    started: str | None = None
    last: dict = {}
    for entry in map(json.loads, lines):
        last = entry
        if "started" in entry:
            started = entry["started"]
        elif "test" in entry:
            started = None
            results[entry["test"]] = Result(entry["outcome"], entry["reason"], entry["served"])
    if "finished" not in last:
        if started is None:
            raise Broken(f"pytest ended with status {status} before or between tests, see {log}")
        results[started] = Result("failed", f"the process ended with status {status}")
        return Run(level, results)
    if last["imported"] != (level is not None):
        raise Broken(f"at level {level}, liteboost_adaptor was {'' if last['imported'] else 'not '}imported")
    return Run(level, results, Counter(last["served"]), last.get("code") or "commit unknown")
