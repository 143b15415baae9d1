"""``python -m liteboost_adaptor shard``: a checkpoint sharded into a file a process, or put together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def shard(
    source: Annotated[Path, typer.Argument(help="folder of a model", exists=True, file_okay=False)],
    target: Annotated[Path, typer.Argument(help="folder that is made")],
    tp: Annotated[int | None, typer.Option("--tp", min=2, help="number of processes")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="put a sharded checkpoint together again")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="run Python code that lies in the folder of the model")
    ] = False,
) -> None:
    """Shard a checkpoint, a file for each process, or merge one.

    --merge puts the files together again. `from_pretrained` of the new folder, under torchrun with as many
    processes, reads a process's own file.
    """
    if (tp is None) != merge:
        raise typer.BadParameter("give either --tp N or --merge")
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from ..parallel.checkpoint import resharding

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("merging" if merge else "sharding", total=resharding.size_of(source))
        if merge:
            resharding.merge_checkpoint(source, target, lambda count: bar.advance(task, count))
        else:
            resharding.shard_checkpoint(
                source, target, tp, lambda count: bar.advance(task, count), trust_remote_code
            )
        bar.update(task, completed=resharding.size_of(target), total=resharding.size_of(target))
