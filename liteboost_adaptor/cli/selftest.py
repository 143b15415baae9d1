"""``python -m liteboost_adaptor selftest``: every op held against its reference on the device at hand."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from ..errors import ConfigError
from ..outputs import check_writable
from . import tables
from .bench import progress_bar
from .status import console_for

if TYPE_CHECKING:
    from ..selftest.kit import Stage
    from ..selftest.report import Report


def selftest(
    device: Annotated[str, typer.Option(help="cpu, npu, or npu:1 and on for another NPU.")],
    ops: Annotated[str, typer.Option(help="Separated by commas; all if unset.")] = "",
    full: Annotated[
        bool,
        typer.Option(
            "--report",
            help="On an NPU: also graphs, collectives, tiny models of 20 families, launches, a timed step.",
        ),
    ] = False,
    report_file: Annotated[
        Path | None,
        typer.Option(
            "--output", metavar="FILE.md", help="Where the report goes; ./selftest-DEVICE.md if unset."
        ),
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write all figures; - for standard output.")
    ] = None,
) -> None:
    """Compare every op with its reference; write a report.

    The reference is computed in float64, over shapes, strides and dtypes. The report is Markdown with
    versions, device, operators and figures, to be pasted into an issue. On an NPU the answers replace those
    of first uses. Exit status 1 when an op differs from its reference, or a stage of the full report fails.
    """
    if full and device == "cpu":
        raise ConfigError("--report is about an NPU; found --device cpu. Leave one of them out.")
    path = report_file or Path(f"selftest-{device.replace(':', '-')}.md")
    check_writable("--output", path)
    if json_file is not None and json_file != "-":
        check_writable("--json", Path(json_file))
    from ..selftest import kit, report

    names = tuple(name.strip() for name in ops.split(",") if name.strip())
    with progress_bar() as advance:
        found = report.run(device, names, lambda done, total, what: advance(what, done, total))
        stages = []
        if full:
            # Kept as it grows: whatever happens to the machine later, this much was seen.
            path.write_text(report.text(found), encoding="utf-8")
            todo = kit.run(found.device, kit.STAGES, lambda done, total, what: advance(what, done, total))
            for stage in todo:
                stages.append(stage)
                path.write_text(report.text(found) + kit.text(stages), encoding="utf-8")
    path.write_text(report.text(found) + (kit.text(stages) if full else ""), encoding="utf-8")
    _show(found, stages, path, json_file)
    faults = [found.fault] if found.fault else []
    faults += [f"{stage.name}: {stage.words}" for stage in stages if stage.outcome == "FAIL"]
    for fault in faults:
        typer.echo(f"error: {fault}", err=True)
    if faults:
        raise typer.Exit(1)


def _show(found: Report, stages: Sequence[Stage], path: Path, json_file: str | None) -> None:
    from ..selftest import report

    console = console_for(sys.stderr if json_file == "-" else sys.stdout)
    console.print(tables.selftest_table(found.facts, [report.row(result) for result in found.results]))
    for stage in stages:
        console.print(Text(f"{stage.name}: {stage.outcome}, {stage.words}"))
    console.print(Text(f"report: {path}"))
    text = json.dumps({**found.to_dict(), "stages": [vars(stage) for stage in stages]}, indent=2) + "\n"
    if json_file == "-":
        sys.stdout.write(text)
    elif json_file is not None:
        Path(json_file).write_text(text, encoding="utf-8")
