"""``python -m liteboost_adaptor status SCRIPT``: run a script, then say what was replaced in it."""

from __future__ import annotations

import json
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from .. import summary
from ..errors import ConfigError
from . import tables

if TYPE_CHECKING:
    from ..report import Status

#: Columns of a table that goes to a file or a pipe, which has no width of its own.
PIPE_WIDTH = 160


def status(
    script: Annotated[Path, typer.Argument(help="A Python script, run as if by `python SCRIPT`.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Its arguments.")] = None,
    show_all: Annotated[
        bool, typer.Option("--all", help="Every rule, also those that no model has a use for.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the status as JSON, the last line of the output.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json-file", metavar="FILE", help="Write the status as JSON to FILE.")
    ] = None,
) -> None:
    """Run a script, then say what was served, what not, and why.

    The package is imported before the script. The exit status is that of the script. Where it fails, the
    status comes first, on standard error.
    """
    if not script.exists():
        raise ConfigError(f"status runs a script; found no {str(script)!r}. Give the path of one.")
    code, fault, namespace = run_script(script, arguments or [])
    snapshot = _snapshot()
    del namespace  # models are listed while they live; until here the script's own names kept them
    _show(snapshot, failed=code != 0, show_all=show_all, as_json=as_json, json_file=json_file)
    if fault is not None:
        print_fault(fault, script)
    leave(code)


def run_script(script: Path, arguments: Sequence[str]) -> tuple[int, BaseException | None, dict[str, Any]]:
    """Run a script as the main program of this process.

    Args:
        script: A Python file, or a folder or archive with a ``__main__.py``.
        arguments: Its ``sys.argv[1:]``.

    Returns:
        Its exit status as Python would give it, the exception that ended it if any, and its global names.
    """
    argv, path = sys.argv, sys.path[:]
    sys.argv = [str(script), *arguments]
    if script.is_file():
        sys.path.insert(0, str(script.resolve().parent))
    try:
        return 0, None, runpy.run_path(str(script), run_name="__main__")
    except SystemExit as done:
        if done.code is None or isinstance(done.code, int):
            return done.code or 0, None, {}
        sys.stderr.write(f"{done.code}\n")
        return 1, None, {}
    except KeyboardInterrupt as fault:
        return 128 + signal.SIGINT, fault, {}
    except Exception as fault:  # noqa: BLE001  (whatever a script raises ends it, and is printed)
        return 1, fault, {}
    finally:
        sys.argv, sys.path[:] = argv, path


def print_fault(fault: BaseException, script: Path) -> None:
    """Print a traceback as Python would have, without the frames that are ours."""
    trace: TracebackType | None = fault.__traceback__
    start = trace
    while start is not None and start.tb_frame.f_code.co_filename != str(script):
        start = start.tb_next
    # A script that cannot be compiled has no frame of its own.
    traceback.print_exception(type(fault), fault, start)


def leave(code: int) -> NoReturn:
    """End the command with the script's own status."""
    raise typer.Exit(code & 0xFF)


def _snapshot() -> Status:
    import liteboost_adaptor

    return liteboost_adaptor.status()


def _show(snapshot: Status, *, failed: bool, show_all: bool, as_json: bool, json_file: Path | None) -> None:
    if json_file is not None:
        json_file.write_text(snapshot.to_json() + "\n", encoding="utf-8")
    sys.stdout.flush()
    stream = sys.stderr if failed or as_json else sys.stdout
    if not as_json or failed:
        console = console_for(stream)
        console.print(
            tables.status_table(snapshot.to_dict())
            if show_all
            else tables.status_summary(snapshot, min(console.width, summary.WIDTH))
        )
    if as_json:
        # One line, so that it can be told from whatever the script printed.
        sys.stdout.write(json.dumps(snapshot.to_dict()) + "\n")
        sys.stdout.flush()


def console_for(stream: Any) -> Console:
    """A console as wide as the terminal, or wide enough for a table where there is none."""
    return Console(file=stream) if stream.isatty() else Console(file=stream, width=PIPE_WIDTH)
