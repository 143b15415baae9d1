"""``python -m liteboost_adaptor build``: compile the kernels for the torch installed now."""

from __future__ import annotations

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
from rich.text import Text

from .. import __version__, native, native_build
from ..environment import ascend
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
    isas = ", ".join(info.get("isas", []))
    console = Console()
    console.print(Text(f"Built for torch {info.get('torch')}: {library}"), soft_wrap=True)
    console.print(Text(f"Instruction sets: {isas}. Processes started from now on use it."))


def _no_npu() -> str:
    version = ascend.torch_npu_version()
    found = f"torch_npu {version} is installed" if version else "torch_npu is not installed either"
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
            steps = {"completed": done, "total": total} if total else {}
            bar.update(task, description=_short(what), **steps)

        return native_build.build_cpu(advance, jobs)


def _short(what: str) -> str:
    """The end of a build tool's line, where the file's name is."""
    return what if len(what) <= 60 else "…" + what[-59:]
