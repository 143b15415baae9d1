"""``python -m liteboost_adaptor doctor``: what is installed, what is missing, what to do."""

from __future__ import annotations

import json
import sys
import warnings
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..environment.ascend import OPERATORS
from ..environment.diagnosis import Diagnosis, diagnose


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Say what is installed, what is missing, and what to do.

    Reports versions, processor, kernels, NPU and CANN, and every problem. Exit status 0 when scripts can run
    with the package, 1 otherwise.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # everything warned of is a line of the report
        diagnosis = diagnose()
    if as_json:
        typer.echo(json.dumps(diagnosis.to_dict(), indent=2))
    else:
        _show(diagnosis, Console())
    raise typer.Exit(0 if diagnosis.usable else 1)


def _show(diagnosis: Diagnosis, console: Console) -> None:
    table = Table(title="liteboost_adaptor doctor", show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(diagnosis):
        table.add_row(name, Text(value))
    console.print(table)
    if not diagnosis.problems:
        console.print("[green]Everything is in place.[/green]")
    for problem in diagnosis.problems:
        label = Text(
            "error: " if problem.fatal else "note: ", style="bold red" if problem.fatal else "yellow"
        )
        console.print(label + Text(problem.what))
        console.print(Text(f"  -> {problem.do}"), style="bold", soft_wrap=True)


def _rows(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    rows = [("interpreter", sys.executable)]
    rows += [(name, version or "not installed") for name, version in diagnosis.versions.items()]
    cpu, found, ascend = diagnosis.cpu, diagnosis.native, diagnosis.ascend
    rows.append(("CPU", f"{cpu['name']} ({cpu['machine']})"))
    rows.append(("instruction sets", ", ".join(cpu["isas"])))
    rows.append(("kernels", _kernels(found)))
    if found.get("build_info"):
        info = found["build_info"]
        rows.append(("built for", f"torch {info.get('torch')} with {info.get('compiler')}"))
    tools = [name for name, path in found["tools"].items() if path]
    rows.append(("build tools", ", ".join(tools) or "none"))
    rows.append(("NPUs", ", ".join(ascend["devices"]) or "none"))
    rows.append(("CANN", "loadable" if ascend["cann_loadable"] else f"not loadable: {ascend['cann_fault']}"))
    if ascend["cann_version"] or ascend["soc"]:
        rows.append(("CANN version, SoC", f"{ascend['cann_version'] or '?'}, {ascend['soc'] or '?'}"))
    if ascend["missing_operators"] is not None:
        missing = ascend["missing_operators"]
        there = len(OPERATORS) - len(missing)
        rows.append(("aclnn operators", f"{there} of {len(OPERATORS)} that we can use"))
        if missing:
            rows.append(("", f"not in this CANN: {', '.join(missing)}"))
    if ascend["cann_folder"]:
        rows.append(("CANN folder", ascend["cann_folder"]))
    if kernels := found["npu"]:
        built = f"{kernels['path']}, built for torch_npu {kernels['build_info'].get('torch_npu')}"
        rows.append(("NPU kernels", f"none: {kernels['reason']}" if kernels["reason"] else built))
    rows.append(("settings", ", ".join(f"{name}={value!r}" for name, value in diagnosis.settings.items())))
    return rows


def _kernels(found: dict[str, Any]) -> str:
    if found["backend"] == "native":
        return f"{found['path']}, running {found['isa']}"
    if found["backend"] == "reference":
        return f"none: {found['reason']}"
    return f"not loaded: {found['reason']}"
