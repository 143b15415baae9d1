"""Where the time of a recorded decode step goes, by operator (``bench.steps --profile``).

One step, that of the median time, is shown whole, so that its rows add up to it. Steps that nobody profiles
take turns with those that are.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from ..errors import ConfigError
from ..report import report

ops = torch.ops.liteboost

#: Names of the rows that are no operator.
SMALL, STOPPED = "numbers and views", "programs that stopped"
NOTES, AROUND = "the profile itself", "around the program: Python, modules, caches"


@dataclass(frozen=True)
class Event:
    """An instruction of a program that ran.

    Attributes:
        name: Of the operator, or the instruction's word.
        operand: Dtype and sizes of the largest tensor read; empty without one.
        run: Number of the program's run; below zero where it stopped, and others or the original followed.
        begin: Nanoseconds.
        end: Nanoseconds.
        bytes: Of all tensors read and written; of a table the rows looked up, of a view none.
    """

    name: str
    operand: str
    run: int
    begin: int
    end: int
    bytes: int


@dataclass(frozen=True)
class Row:
    """What the calls of one operator with operands of one kind took.

    Attributes:
        name: The operator and its largest operand, or one of `SMALL`, `STOPPED`, `NOTES`, `AROUND`.
        calls: In the step.
        seconds: Of all of them.
        bytes: Of all of them.
    """

    name: str
    calls: int
    seconds: float
    bytes: int


@dataclass(frozen=True)
class StepProfile:
    """A step.

    Attributes:
        seconds: Of the step shown.
        unprofiled: Median of the steps between.
        read_rate: Bytes a second of the bare sum of a large buffer, the median of those between.
        rows: They add up to ``seconds``; the longest comes first.
        events: In order.
    """

    seconds: float
    unprofiled: float
    read_rate: float
    rows: list[Row]
    events: list[Event]


def profile(
    step: Callable[[], object], bare_sum: Callable[[], object], nbytes: int, rounds: int
) -> StepProfile:
    """Run ``step`` so many times profiled and as many times not, beside ``bare_sum`` of ``nbytes`` bytes.

    Raises:
        ConfigError: A step was not served by a program, in whichever round.
    """
    profiled: list[tuple[float, list[Event]]] = []
    alone: list[float] = []
    sums: list[float] = []
    for _ in range(rounds):
        alone.append(_seconds(step))
        profiled.append(_profiled(step))
        sums.append(_seconds(bare_sum))
    seconds, events = sorted(profiled, key=lambda each: each[0])[len(profiled) // 2]
    return StepProfile(seconds, median(alone), nbytes / median(sums), _rows(seconds, events), events)


def _profiled(step: Callable[[], object]) -> tuple[float, list[Event]]:
    counter = report.counter("step.program")
    before = counter.fallbacks.copy()
    ops._program_begin_profile()
    try:
        seconds = _seconds(step)
    finally:
        events = _events(*ops._program_end_profile())
    if not any(event.run > 0 for event in events):
        reasons = "; ".join(counter.fallbacks - before) or "none of its calls is a decode step"
        raise ConfigError(
            f"--profile shows recorded steps, and no program served this one: {reasons}. "
            "Choose another --arch or --dtype, or leave --profile out."
        )
    return seconds, events


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _events(names: list[str], operands: list[str], numbers: list[int]) -> list[Event]:
    columns = (numbers[at::4] for at in range(4))
    return [Event(*each) for each in zip(names, operands, *columns, strict=True)]


def _label(event: Event) -> str:
    if event.run < 0:
        return STOPPED
    return f"{event.name.removeprefix('liteboost::')}({event.operand})" if event.bytes else SMALL


def _rows(seconds: float, events: list[Event]) -> list[Row]:
    grouped: dict[str, list[Event]] = {}
    spans: dict[int, tuple[int, int]] = {}
    for event in events:
        grouped.setdefault(_label(event), []).append(event)
        spans[event.run] = spans.get(event.run, (event.begin, 0))[0], event.end
    rows = [
        Row(
            name,
            len(each),
            sum(event.end - event.begin for event in each) / 1e9,
            sum(event.bytes for event in each),
        )
        for name, each in grouped.items()
    ]
    rows.sort(key=lambda row: -row.seconds)
    spent, inside = sum(row.seconds for row in rows), sum(end - begin for begin, end in spans.values()) / 1e9
    return [*rows, Row(NOTES, 0, inside - spent, 0), Row(AROUND, 0, seconds - inside, 0)]


def table(found: StepProfile) -> Iterable[str]:
    """Markdown, a row for each kind of call."""
    yield "| operator (its largest operand) | calls | ms | of the step | MB | GB/s | of the bare sum |\n"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
    whole = Row(
        "sum", sum(row.calls for row in found.rows), found.seconds, sum(row.bytes for row in found.rows)
    )
    for row in (*found.rows, whole):
        rate = row.bytes / row.seconds if row.seconds > 0 else 0.0
        yield (
            f"| {row.name} | {row.calls} | {1e3 * row.seconds:.3f} | {row.seconds / found.seconds:.1%} "
            f"| {row.bytes / 1e6:.1f} | {rate / 1e9:.1f} | {rate / found.read_rate:.0%} |\n"
        )
    yield f"\nUnprofiled steps between take {1e3 * found.unprofiled:.3f} ms: "
    yield f"the sum is {found.seconds / found.unprofiled:.1%} of that. "
    yield f"The bare sum of a large buffer reads {found.read_rate / 1e9:.1f} GB/s.\n"


def write_trace(found: StepProfile, path: Path) -> None:
    """The step as a Chrome trace: an array of "complete" events, which Perfetto and chrome://tracing open.

    Written to a temporary name beside ``path``, which is then renamed.
    """
    start = found.events[0].begin
    trace = [
        {
            "name": event.name,
            "ph": "X",
            "ts": (event.begin - start) / 1e3,
            "dur": (event.end - event.begin) / 1e3,
            "pid": 0,
            "tid": 0,
            "args": {"operand": event.operand, "bytes": event.bytes},
        }
        for event in found.events
    ]
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(json.dumps(trace), encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
