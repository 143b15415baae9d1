"""``python -m liteboost_adaptor export``: a model as a folder that runs without Python."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .status import console_for


def export(
    source: Annotated[
        Path, typer.Argument(metavar="MODEL", help="folder of a model", exists=True, file_okay=False)
    ],
    target: Annotated[Path, typer.Argument(metavar="DIR", help="folder to write: new, or empty")],
    quant: Annotated[
        str,
        typer.Option(
            help="w8a16, w4a16, w8a8 or w4a8: what weights are quantized to, unless MODEL is quantized"
        ),
    ] = "",
    max_tokens: Annotated[
        int | None,
        typer.Option(min=2, help="tokens of a sequence, prompt and all; by default the model's, up to 4096"),
    ] = None,
    kv8: Annotated[bool, typer.Option("--kv8", help="keep keys and values as integers of 8 bits")] = False,
    dtype: Annotated[str, typer.Option(help="of the weights; auto: as MODEL says")] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="run Python code that lies in MODEL")
    ] = False,
) -> None:
    """Write a model as a folder that runs without Python.

    What cannot be exported is refused with a reason: the function or the setting.
    """
    from ..export.folder import export_folder

    scheme = "+".join([*([quant] if quant else []), *(["kv8"] if kv8 else [])])
    console = console_for(sys.stderr)
    done = export_folder(source, target, scheme or None, max_tokens, dtype, console.print, trust_remote_code)
    prompts, steps = done.programs
    console_for(sys.stdout).print(
        f"{target}: {done.bytes / 1e6:,.1f} MB, {prompts} programs for prompts and {steps} for tokens behind "
        f"them, sequences of up to {done.longest} tokens"
    )
