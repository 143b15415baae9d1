"""``python -m liteboost_adaptor selftest``: every op held against its reference on the device at hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from ..errors import ConfigError
from . import tables
from .bench import progress_bar
from .status import console_for

if TYPE_CHECKING:
    from ..selftest.report import Report


def selftest(
    device: Annotated[str, typer.Option(help="cpu, npu, or npu:1 and on for another NPU.")],
    ops: Annotated[str, typer.Option(help="Separated by commas; all if unset.")] = "",
    report_file: Annotated[
        Path | None,
        typer.Option(
            "--report", metavar="FILE.md", help="Where the report goes; ./selftest-DEVICE.md if unset."
        ),
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write all figures; - for standard output.")
    ] = None,
) -> None:
    """Compare every op with its reference in float64, over shapes, strides and dtypes; write a report.

    The report is Markdown with versions, device, operators and figures, to be pasted into an issue. On an NPU
    the answers replace those of first uses. Exit status 1 when an op differs from its reference.
    """
    path = report_file or Path(f"selftest-{device.replace(':', '-')}.md")
    for option, target in (("--report", path), ("--json", Path(json_file or "-"))):
        if not target.resolve().parent.is_dir():
            raise ConfigError(
                f"{option} {target}: there is no folder {target.resolve().parent}. Make it first."
            )
    from ..selftest import report

    names = tuple(name.strip() for name in ops.split(",") if name.strip())
    with progress_bar() as advance:
        found = report.run(device, names, lambda done, total, what: advance(what, done, total))
    path.write_text(report.text(found), encoding="utf-8")
    _show(found, path, json_file)
    if found.fault:
        typer.echo(f"error: {found.fault}", err=True)
        raise typer.Exit(1)


def _show(found: Report, path: Path, json_file: str | None) -> None:
    from ..selftest import report

    console = console_for(sys.stderr if json_file == "-" else sys.stdout)
    console.print(tables.selftest_table(found.facts, [report.row(result) for result in found.results]))
    console.print(Text(f"report: {path}"))
    text = json.dumps(found.to_dict(), indent=2) + "\n"
    if json_file == "-":
        sys.stdout.write(text)
    elif json_file is not None:
        Path(json_file).write_text(text, encoding="utf-8")
