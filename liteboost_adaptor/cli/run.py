"""``python -m liteboost_adaptor run PROGRAM``: a program runs as if its first line were ours."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from ..bench.settings import usable_cores
from ..config import Settings, child_environment, settings, with_overrides
from ..errors import ConfigError
from . import programs

NOT_FOUND, NOT_EXECUTABLE = 127, 126  # as a shell ends


def run(
    program: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROGRAM [ARGS]", help="A script or a console command, and its arguments."),
    ] = None,
    is_module: Annotated[
        bool, typer.Option("-m", help="PROGRAM is the name of a module, as behind `python -m`.")
    ] = False,
    level: Annotated[str | None, typer.Option(metavar="N", help="LITEBOOST_LEVEL.")] = None,
    quant: Annotated[str | None, typer.Option(metavar="SCHEME", help="LITEBOOST_QUANT.")] = None,
    tp: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Start N ranks, over which models are sharded.")
    ] = None,
) -> None:
    """Run a program as it is, with this package.

    PROGRAM, and what it starts, runs as if its first line were `import liteboost_adaptor`. It takes the place
    of this process: its exit status, signals and output are its own. A name without a slash is a command,
    looked for beside this Python and then on PATH, else a file. Exit status 127: there is no such program;
    126: it cannot be run.
    """
    given = {"level": level, "quant": quant, "tp": None if tp is None else str(tp)}
    wanted = {name: value for name, value in given.items() if value is not None}
    with_overrides(settings(), **wanted)  # a wrong value is an error here, not in the program
    changes: dict[str, str | None] = {f"LITEBOOST_{name.upper()}": value for name, value in wanted.items()}
    if not program:
        raise ConfigError("run needs a program: a script, -m MODULE or a console command. Name one.")
    name, *arguments = program
    try:
        command = programs.of_module(name, arguments) if is_module else programs.of_name(name, arguments)
    except FileNotFoundError as fault:
        typer.echo(f"error: {fault}", err=True)
        raise typer.Exit(NOT_FOUND) from None
    if tp is not None and tp > 1:
        command = command.in_ranks(tp)
        if "OMP_NUM_THREADS" not in child_environment():
            changes["OMP_NUM_THREADS"] = str(max(1, usable_cores() // tp))
    _become(command, changes | _status_file(settings()))


def _status_file(found: Settings) -> dict[str, str | None]:
    # A child may be in another folder than the one in which the user has named the file.
    return {"LITEBOOST_STATUS_FILE": os.path.abspath(found.status_file)} if found.status_file else {}


def _become(command: programs.Command, changes: dict[str, str | None]) -> NoReturn:
    environment = programs.environment(**changes)
    sys.stdout.flush()
    sys.stderr.flush()
    # Python ignores these, and what is ignored stays so in what takes its place.
    for name in ("SIGPIPE", "SIGXFSZ"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execve(command.file, command.argv, environment)
    except OSError as fault:
        typer.echo(
            f"error: {Path(command.file)} cannot be run: {fault.strerror}. Make it executable, or name its "
            "interpreter.",
            err=True,
        )
        raise typer.Exit(NOT_EXECUTABLE) from None
