"""``python -m liteboost_adaptor new-op NAME``: the files that a new op needs, in a checkout."""

from __future__ import annotations

from typing import Annotated

import typer

from . import new_op_files


def new_op(
    name: Annotated[str, typer.Argument(help="What it is to be called: torch.ops.liteboost.NAME.")],
) -> None:
    """Write the files of a new op into this checkout.

    Its name goes into the lists of ops. The op compiles, passes its tests and multiplies by a number.
    docs/adding_an_op.md says what to change.
    """
    changes = new_op_files.plan(name, new_op_files.ROOT)
    new_op_files.write(changes, new_op_files.ROOT)
    for change in changes:
        typer.echo(f"{'new    ' if change.is_new else 'changed'}  {change.path}")
    typer.echo(
        f"\n{name} multiplies by a number so far. What to change, file by file: docs/adding_an_op.md\n"
        f"make setup compiles it, and make test PYTEST_ARGS='-k {name}' runs its tests. One fails until its "
        "speed is in docs/op_speed.md:\n"
        "    .venv/bin/python -m liteboost_adaptor.bench.ops --write docs/op_speed.md"
    )
