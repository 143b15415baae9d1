"""``python -m liteboost_adaptor build``: compile the kernels for the torch installed now."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from .. import __version__, native, native_build
from ..errors import NativeLibraryError


def build(
    npu: Annotated[bool, typer.Option("--npu", help="The kernels for Ascend NPUs.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compilers at a time; one a core if unset.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Compile the kernels against the torch that is installed now, from the sources in the package."""
    if npu:
        raise NativeLibraryError(_no_npu())
    library = _build_with_progress(jobs)
    info = dict(native.inspect(library, native.torch_version()).build_info)
    if as_json:
        typer.echo(json.dumps({"path": str(library), "build_info": info}, indent=2))
        return
    console = Console()
    console.print(f"Built for torch {info.get('torch')}: [bold]{library}[/bold]", soft_wrap=True)
    console.print(
        f"Instruction sets: {', '.join(info.get('isas', []))}. Processes started from now on use it."
    )


def _no_npu() -> str:
    if importlib.util.find_spec("torch_npu") is None:
        found = "torch_npu is not installed either (pip install 'liteboost_adaptor[npu]')"
    else:
        found = "torch_npu is installed"
    return (
        "`build --npu` asks for the NPU kernels, and this version of liteboost_adaptor "
        f"({__version__}) has none yet: they come with a later release; {found}. "
        f"`{native.BUILD_COMMAND}` without --npu builds the CPU kernels."
    )


def _build_with_progress(jobs: int | None) -> Path:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)  # so that the output can be piped
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)

        def advance(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total or None, description=_short(what))

        return native_build.build_cpu(advance, jobs)


def _short(what: str) -> str:
    """The end of a build tool's line, where the file's name is."""
    return what if len(what) <= 60 else "…" + what[-59:]
