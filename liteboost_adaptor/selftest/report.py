"""Every op compared on one device, and a text of it to paste into an issue."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .. import native, native_npu
from ..errors import ConfigError
from ..ops import npu_ops
from . import facts, first_use, helper
from .case import kinds_of, ops_with_cases
from .compare import Figure, Result, compare

#: Called with (kinds done, kinds in all, what is being compared).
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Report:
    """What was compared, on what.

    Attributes:
        device: ``"cpu"`` or ``"npu:0"``.
        facts: Versions, device and libraries, by name, as text.
        operators: For an NPU, every aclnn operator of ours: signature, whether it is there, and where.
        results: One for each op and kind.
    """

    device: str
    facts: dict[str, str]
    operators: dict[str, dict[str, Any]]
    results: tuple[Result, ...]

    @property
    def failed(self) -> tuple[Result, ...]:
        """Ops and kinds that differ from their reference, or took the device away."""
        return tuple(result for result in self.results if result.failed or result.fault)

    @property
    def fault(self) -> str:
        """Why the device does not pass, or an empty string."""
        if self.failed:
            kinds = ", ".join(f"{result.op} ({result.kind})" for result in self.failed)
            return f"{len(self.failed)} of {len(self.results)} kinds differ from their reference: {kinds}"
        return "" if any(result.served for result in self.results) else "no op is served by a kernel"

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON types."""
        results = [
            {
                "op": result.op,
                "kind": result.kind,
                "outcome": outcome(result),
                "fault": result.fault,
                "seconds": result.seconds,
                "cases": [{**vars(figure), "passed": figure.passed} for figure in result.figures],
            }
            for result in self.results
        ]
        return {
            "device": self.device,
            "passed": not self.fault,
            "fault": self.fault,
            "facts": self.facts,
            "operators": self.operators,
            "results": results,
        }


def run(
    device: str, names: tuple[str, ...] = (), progress: Progress = lambda done, total, what: None
) -> Report:
    """Compare every op and kind on a device.

    On an NPU the answers take the place of those remembered from first uses: later processes go by them.

    Args:
        device: ``"cpu"``, ``"npu"`` or ``"npu:1"``.
        names: Ops to compare; empty for all.
        progress: Told of every kind.

    Raises:
        ConfigError: No such device or op.
    """
    there = [op for op in ops_with_cases() if device != "cpu" or op not in npu_ops()]
    unknown = sorted(set(names) - set(there))
    if unknown:
        raise ConfigError(f"no op is called {', '.join(unknown)}. Ops: {', '.join(sorted(there))}.")
    place = _ready(device)
    pairs = [(op, kind) for op in there if not names or op in names for kind in kinds_of(op)]
    results = []
    for done, (op, kind) in enumerate(pairs):
        progress(done, len(pairs), f"{op} {kind}")
        results.append(_compared(op, kind, place))
        if place != "cpu" and (results[-1].served or results[-1].fault):
            first_use.remember(results[-1])
    found = facts.of_cpu() if place == "cpu" else facts.of_npu()
    found["comparisons"] = _cost(results, place)
    operators = {} if place == "cpu" else native_npu.operators()
    return Report(place, found, operators, tuple(results))


def _ready(device: str) -> str:
    """Load the kernels of a device; return its name with an index."""
    kind, _, index = device.partition(":")
    if device != "cpu" and (kind != "npu" or (index and not index.isdecimal())):
        raise ConfigError(f"--device must be cpu, npu or npu:0 and on; found {device!r}. Change it.")
    if kind == "cpu":
        native.load()
        return "cpu"
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as fault:
        raise ConfigError(
            f"--device {device} needs torch_npu and CANN: {fault}. "
            "`python -m liteboost_adaptor doctor` says more."
        ) from None
    count = torch.npu.device_count()
    number = int(index or 0)
    if native_npu.load() is None or number >= count:
        raise ConfigError(
            f"--device {device}: there are {count} NPUs. `python -m liteboost_adaptor doctor` says more."
        )
    torch.npu.set_device(number)
    return f"npu:{number}"


def _cost(results: list[Result], place: str) -> str:
    """What the comparisons took, and what of it a program meets."""
    if not results:
        return "none"
    slowest = max(results, key=lambda result: result.seconds)
    words = (
        f"{len(results)} kinds in {sum(result.seconds for result in results):.1f} s, of which {slowest.op} "
        f"({slowest.kind}) took {slowest.seconds:.1f} s"
    )
    if place == "cpu":
        return words
    return (
        f"{words}; {helper.started()} helper processes started in {helper.start_seconds():.1f} s. A "
        "program compares the kinds it uses when they are first used, each for at most "
        f"{helper.KIND_SECONDS:.0f} s, and once their answers are kept none"
    )


def _compared(op: str, kind: str, device: str) -> Result:
    try:
        return compare(op, kind, device) if device == "cpu" else first_use.compare_apart(op, kind)
    except torch.OutOfMemoryError as fault:
        words = " ".join(str(fault).split())
        return Result(op, kind, (Figure("every case", float("inf"), 0.0, f"OutOfMemoryError: {words}"),))


def outcome(result: Result) -> str:
    """``"pass"``, ``"FAIL"``, or ``"not served"``: the reference runs, for the reason given."""
    if result.failed or result.fault:
        return "FAIL"
    return "pass" if result.served else "not served"


def row(result: Result) -> tuple[str, str, str, str, str, str, str, str]:
    """Op, kind, cases served, largest error, what it may be, seconds, outcome, remark: a line in a table."""
    worst = result.worst
    fallback = next((figure.fallback for figure in result.figures if figure.fallback), "")
    remark = result.reason if outcome(result) == "FAIL" else fallback
    return (
        result.op,
        result.kind,
        f"{len(result.served)} of {len(result.figures)}",
        f"{worst.error:.2e}" if worst else "",
        f"{worst.allowed:.2e}" if worst else "",
        f"{result.seconds:.2f}",
        outcome(result),
        remark,
    )


def text(report: Report) -> str:
    """The report in Markdown: facts, operators, a line for each kind, and every case that failed."""
    passed = f"**fails**: {report.fault}" if report.fault else "passes"
    lines = [f"# liteboost_adaptor selftest on {report.device}: {passed}", ""]
    lines += [f"- {name}: {value}" for name, value in report.facts.items()]
    if report.operators:
        lines += ["", "| operator | signature | found in |", "|---|---|---|"]
        lines += [
            f"| {name} | {found['signature']} | {found['library'] or '**not in this CANN**'} |"
            for name, found in sorted(report.operators.items())
        ]
    lines += [
        "",
        "| op | kind | served | error | allowed | seconds | outcome | remark |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += ["| " + " | ".join(row(result)).replace("\n", " ") + " |" for result in report.results]
    for result in report.failed:
        lines += ["", f"{result.op}, {result.kind}:"]
        lines += [f"- {figure.words}" for figure in result.failed]
    return "\n".join(lines) + "\n"
