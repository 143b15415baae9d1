"""``python -m liteboost_adaptor quantize``: a checkpoint with weights of 8 or 4 bits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from ..errors import ConfigError
from .bench import progress_bar
from .status import console_for

if TYPE_CHECKING:
    from ..quantization.offline import OfflineResult

#: Layers whose error is shown; further ones are counted.
_SHOWN = 12
#: Characters of the longest bar.
_BAR = 30


def quantize(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="folder of a model, as safetensors")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="folder to write: new, empty, or begun")],
    scheme: Annotated[
        str,
        typer.Option(help="w8a16, w4a16, w8a8, w4a8, with +kv8 behind it or not; kv8: weights stay"),
    ] = "w4a16",
    group_size: Annotated[
        int, typer.Option(help="weights that share a scale, of 4 bits: 32, 64 or 128")
    ] = 32,
    asymmetric: Annotated[bool, typer.Option("--asymmetric", help="with zero points, of 4 bits")] = False,
    head: Annotated[int, typer.Option(help="bits of the output layer: 8, or 16 for as it is")] = 8,
    keep: Annotated[
        str, typer.Option(help="layers that stay as they are, separated by commas, such as lm_head")
    ] = "",
    calibrate: Annotated[
        str, typer.Option(metavar="TEXT", help="file with a text that the model reads before it is quantized")
    ] = "",
    kv_cache: Annotated[
        str, typer.Option(help="int8: models that are loaded from DST keep keys and values as integers")
    ] = "",
    method: Annotated[
        str, typer.Option(help="with a text: awq or gptq; smoothquant, of w8a8. By default the first of them")
    ] = "",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="run Python code that lies in SRC")
    ] = False,
) -> None:
    """Quantize a checkpoint.

    Interrupted and called again, it goes on where it was.
    """
    if not source.is_dir():
        raise ConfigError(f"SRC must be a folder with a model, found {source}; download the model first")
    from ..quantization.config import LiteBoostConfig
    from ..quantization.offline import quantize_folder

    names = [name.strip() for name in keep.split(",") if name.strip()] or None
    config = LiteBoostConfig(
        scheme,
        group_size,
        not asymmetric,
        head,
        names,
        calibrate or None,
        method or None,
        kv_cache=kv_cache or None,
    )
    with progress_bar() as advance:
        done = quantize_folder(source, target, config, advance, trust_remote_code)
    _show(done, target)


def _show(done: OfflineResult, target: Path) -> None:
    console = console_for(sys.stdout)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("layer", overflow="fold")
    table.add_column("scheme")
    table.add_column("relative error", justify="right")
    table.add_column("", no_wrap=True)
    worst = done.errors[0].error if done.errors else 0.0
    for each in done.errors[:_SHOWN]:
        bar = "█" * max(1, round(_BAR * each.error / worst)) if worst else ""
        table.add_row(each.name, each.scheme, f"{each.error:.4f}", bar)
    console.print(table)
    if len(done.errors) > _SHOWN:
        rest = len(done.errors) - _SHOWN
        console.print(f"{rest} more layers with smaller errors: {target}/quantization.json")
    for name, reason in done.refused:
        console.print(f"{name}: {reason}")
    before, after = (f"{size / 1e6:,.1f} MB" for size in (done.bytes_before, done.bytes_after))
    console.print(f"{len(done.errors)} layers quantized, {before} to {after}: {target}")
