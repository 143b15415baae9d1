"""Many programs, in processes of their own: how many differ, by which idioms, and how many replay."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from . import execute
from .idiom import catalogue
from .program import Program, programs

#: Programs a process runs before the next one is started.
CHUNK = 250
#: Programs composed out of idioms in one order.
TOGETHER = 10
#: Seconds in which a program that hangs is given up.
PATIENCE = 600


@dataclasses.dataclass
class Summary:
    """What a campaign found.

    Attributes:
        programs, replayed: How many ran, and how many of them ran recorded steps.
        replays: Steps that ran as programs.
        refused: Why steps were not recorded, by the number of programs.
        used, served: By idiom, in how many programs it was, and in how many of those steps were replayed.
        findings: Of every program that differed: itself, reduced, and how.
    """

    programs: int = 0
    replayed: int = 0
    replays: int = 0
    refused: Counter[str] = dataclasses.field(default_factory=Counter)
    used: Counter[str] = dataclasses.field(default_factory=Counter)
    served: Counter[str] = dataclasses.field(default_factory=Counter)
    findings: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def add(self, record: dict[str, Any]) -> None:
        """One line of a worker."""
        if "finding" in record:
            self.findings.append(record["finding"])
        if "replays" not in record:
            return
        self.programs += 1
        self.replays += record["replays"]
        self.replayed += record["replays"] > 0
        self.used.update(record["idioms"])
        if record["replays"]:
            self.served.update(record["idioms"])
        self.refused.update(record["reasons"])

    def lines(self) -> Iterator[str]:
        share = 100 * self.replayed / max(self.programs, 1)
        yield f"{self.programs} programs, {self.replayed} ({share:.0f} %) with {self.replays} replayed steps"
        yield f"{len(self.findings)} differ"
        by_idioms = Counter((each["kind"], " + ".join(each["reduced"])) for each in self.findings)
        firsts = {
            (each["kind"], " + ".join(each["reduced"])): each["fault"] for each in reversed(self.findings)
        }
        for (kind, names), count in by_idioms.most_common():
            yield f"  {count:4} {kind:9} {names}: {firsts[kind, names]}"
        never = sorted(name for name, count in self.used.items() if count and not self.served[name])
        yield f"{len(self.used)} idioms used; never beside a replayed step: {', '.join(never) or 'none'}"
        yield "why steps were not recorded, by programs:"
        for reason, count in self.refused.most_common(25):
            yield f"  {count:4} {reason}"


def work(count: int, number: int, log: Path, control: bool = False) -> None:
    """Run ``count`` programs drawn with seed ``number``; one line of JSON each into ``log``."""
    blamed: dict[tuple[str, str], bool] = {}
    with log.open("a") as file:

        def each(program: Program) -> None:
            _write(file, {"begun": program.to_dict()})
            signal.alarm(PATIENCE)
            outcome = execute.run(program, control)
            if outcome.recorded and control:
                _write(file, {"finding": as_it_is(program, outcome)})
            elif outcome.fault and not control:
                _write(file, {"finding": finding(program, outcome, blamed)})
            signal.alarm(0)
            names = [choice.idiom for choice in program.choices]
            _write(file, {"replays": outcome.replays, "reasons": outcome.reasons, "idioms": names})

        for start in range(0, count, TOGETHER):
            composed(each, min(TOGETHER, count - start), number * 1009 + start)


def composed(each: Callable[[Program], None], count: int, number: int) -> None:
    """Call ``each`` with ``count`` programs.

    hypothesis tries what comes first more often than the rest, and variations of what it has tried: idioms
    come in another order for every ``number``.
    """
    names = sorted(catalogue())
    random.Random(number).shuffle(names)
    options = {"max_examples": count, "database": None, "deadline": None, "phases": (Phase.generate,)}
    state = random.getstate()
    seed(number)(settings(**options, suppress_health_check=list(HealthCheck))(given(programs(names))(each)))()
    random.setstate(state)


def _write(file: Any, record: dict[str, Any]) -> None:
    file.write(json.dumps(record) + "\n")
    file.flush()


def kind_of(outcome: execute.Outcome) -> str:
    """Which of the comparisons found it."""
    kinds = ("recorded", "served", "counts", "shadow")
    return next((kind for kind in kinds if getattr(outcome, kind)), "")


def finding(
    program: Program, outcome: execute.Outcome, blamed: dict[tuple[str, str], bool] | None = None
) -> dict[str, Any]:
    """`as_it_is`, with as few idioms as show it."""
    reduced = reduce(program, kind_of(outcome), {} if blamed is None else blamed)
    found = as_it_is(reduced, outcome)
    if reduced != program:
        found["fault"] = execute.run(reduced).fault
    return found


def as_it_is(program: Program, outcome: execute.Outcome) -> dict[str, Any]:
    """What is kept of a program that differs."""
    names = sorted({choice.idiom for choice in program.choices})
    found = {"kind": kind_of(outcome), "fault": outcome.fault, "reduced": names}
    return {**found, "program": program.to_dict()}


def reduce(program: Program, kind: str, blamed: dict[tuple[str, str], bool]) -> Program:
    """The program with idioms left out, as far as it still differs in the same way.

    Args:
        program: To be reduced.
        kind: What `kind_of` says of it.
        blamed: Idioms that were found to differ alone before; they are tried first.
    """
    alone = sorted(program.choices, key=lambda choice: not blamed.get((kind, choice.idiom), False))
    for choice in alone:
        less = program.only((choice,))
        if len(program.choices) == 1 or _differs(less, kind):
            blamed[kind, choice.idiom] = True
            return less
    for choice in program.choices:
        less = program.only(tuple(each for each in program.choices if each is not choice))
        if _differs(less, kind):
            return reduce(less, kind, blamed)
    return program


def _differs(program: Program, kind: str) -> bool:
    outcome = execute.run(program)
    return bool(outcome.fault) and kind_of(outcome) == kind


def campaign(count: int, number: int, jobs: int, folder: Path, control: bool = False) -> Summary:
    """``count`` programs in ``jobs`` processes at a time; a process that dies is a finding, too."""
    summary, chunks = Summary(), itertools.count()
    waiting = [min(CHUNK, count - at) for at in range(0, count, CHUNK)]
    running: dict[subprocess.Popen[bytes], tuple[Path, int]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            at, size = next(chunks), waiting.pop(0)
            log = folder / f"chunk-{number}-{at}.jsonl"
            log.write_text("")
            running[_started(size, number * 100_003 + at, log, control)] = log, size
        time.sleep(0.2)
        for process in [process for process in running if process.poll() is not None]:
            log, size = running.pop(process)
            records = [json.loads(line) for line in log.read_text().splitlines()]
            for record in records:
                summary.add(record)
            if process.returncode:
                summary.findings.append(_crash(process, records))
                # Behind the one it died of.
                left = size - 1 - sum("replays" in record for record in records)
                waiting += [left] if left > 0 else []
            sys.stderr.write(f"{summary.programs} programs, {len(summary.findings)} differ\n")
    return summary


def _started(count: int, number: int, log: Path, control: bool) -> subprocess.Popen[bytes]:
    what = ["--worker", str(log), "--count", str(count), "--seed", str(number)]
    command = [sys.executable, "-m", __package__, *what, *(["--control"] if control else [])]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})


def _crash(process: subprocess.Popen[bytes], records: list[dict[str, Any]]) -> dict[str, Any]:
    begun = [record["begun"] for record in records if "begun" in record]
    last = begun[-1] if begun else {"choices": []}
    return {
        "kind": "crash",
        "fault": f"the process ended with {process.returncode}",
        "reduced": sorted({choice["idiom"] for choice in last["choices"]}),
        "program": last,
    }
