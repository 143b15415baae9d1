"""``python -m liteboost_adaptor build``: compile the kernels for the torch installed now."""

from __future__ import annotations

import json
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

from .. import native, native_build, native_npu
from ..errors import NativeLibraryError
from ..native_build import Built


def build(
    npu: Annotated[
        bool | None,
        typer.Option(
            "--npu/--no-npu",
            help="Fail without the kernels for Ascend NPUs, or leave them out. If unset they are built where "
            "torch_npu is installed.",
        ),
    ] = None,
    runner: Annotated[
        bool, typer.Option("--runner", help="Build liteboost-run, too, which runs exported folders.")
    ] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compilers at a time; one a core if unset.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Compile the kernels against the torch installed now.

    Those for NPUs, where torch_npu is installed, too. The sources are in the package. CANN is not needed to
    compile the kernels for NPUs.
    """
    version = native_npu.torch_npu_version()
    if npu and version is None:
        raise NativeLibraryError(
            "`build --npu` asks for the NPU kernels, which are compiled against torch_npu, and torch_npu is "
            f"not installed. Install the one made for torch {native.torch_version()}, or leave --npu out."
        )
    built = _build_with_progress(jobs, npu is not False, runner)
    info = dict(native.inspect(built.library, native.torch_version()).build_info)
    if as_json:
        typer.echo(json.dumps({**_paths(built), "build_info": info, "npu_fault": built.npu_fault}, indent=2))
    else:
        isas = ", ".join(info.get("isas", []))
        console = Console()
        console.print(Text(f"Built for torch {info.get('torch')}: {built.library}"), soft_wrap=True)
        if built.npu is not None:
            console.print(Text(f"Built for torch_npu {version}: {built.npu}"), soft_wrap=True)
        if runner:
            path = built.library.with_name("liteboost-run")
            console.print(Text(f"Built for exported folders: {path}"), soft_wrap=True)
        console.print(Text(f"Instruction sets: {isas}. Processes started from now on use it."))
    if built.npu_fault is not None:
        words = (
            f"the NPU kernels were not built, and models on an NPU run their original code: {built.npu_fault}"
        )
        if npu:
            raise NativeLibraryError(words)
        typer.echo(f"warning: {words}", err=True)


def _paths(built: Built) -> dict[str, str | None]:
    return {"path": str(built.library), "npu": str(built.npu) if built.npu else None}


def _build_with_progress(jobs: int | None, npu: bool, runner: bool) -> Built:
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

        return native_build.build(advance, jobs, npu, runner)


def _short(what: str) -> str:
    """The end of a build tool's line, where the file's name is."""
    return what if len(what) <= 60 else "…" + what[-59:]
