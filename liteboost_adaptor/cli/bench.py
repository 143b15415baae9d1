"""``python -m liteboost_adaptor bench``: how fast each variant is, held against what the machine can do."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from ..bench.peers import commands_of
from ..bench.settings import VARIANTS, Settings, sharded, usable_cores
from ..bench.throughput.settings import at_once, peers_of
from ..config import Settings as CoreSettings
from ..config import with_overrides
from ..errors import ConfigError
from ..outputs import check_writable
from . import tables
from .status import console_for

if TYPE_CHECKING:
    from ..bench.runner import Progress


_Requests = Annotated[
    str | None,
    typer.Option(metavar="1,4,16", help="Measure generate_batch at so many requests at once, instead."),
]
_Peers = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=COMMAND",
        help="llama-bench -m MODEL.gguf, under any name; with --serve llama.cpp or vLLM (docs/serving.md).",
    ),
]


def bench(
    arch: Annotated[
        str,
        typer.Option(
            help="qwen3-0.6b, llama-1b, narrow-28, or the folder of a model (its config.json is enough)."
        ),
    ] = "qwen3-0.6b",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    prompt: Annotated[
        int | None, typer.Option(help="Tokens of the prompt; 128, with --sparse 8192 if unset.")
    ] = None,
    new: Annotated[int, typer.Option(help="Tokens to generate.")] = 32,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    variants: Annotated[
        str,
        typer.Option(help="By commas; w8a16, w4a16, w8a8, w4a8, w4a16+kv8 too; hf-sdpa always runs."),
    ] = ",".join(VARIANTS),
    tp: Annotated[
        int, typer.Option("--tp", help="Also shard the model over so many processes, which share --threads.")
    ] = 1,
    repeats: Annotated[int, typer.Option(help="Rounds of every variant.")] = 5,
    threads: Annotated[int | None, typer.Option(help="Of every process; all cores if unset.")] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write all figures; - for standard output.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw tokens per second.")] = None,
    workdir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the random weight file here for the next run.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or npu with --modelled.")] = "cpu",
    modelled: Annotated[
        bool, typer.Option("--modelled", help="Model a decode step on an Ascend card from a simulated run.")
    ] = False,
    card: Annotated[str, typer.Option(help="With --modelled: 910B, 910B-280T or 910C.")] = "910B",
    sparse: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="Measure block-sparse attention, as LITEBOOST_SPARSE, instead."),
    ] = None,
    trained: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --sparse: a trained model, and heldout.txt, for the loss."),
    ] = None,
    serve: _Requests = None,
    peer: _Peers = None,
) -> None:
    """Time transformers without and with this package.

    Once results agree, variants take turns in processes of their own.

    With --serve: requests that generate_batch answers all at once, beside other engines if they are named.
    With --sparse: attention of one layer over chosen blocks beside dense attention, at --prompt tokens.

    hf-eager, hf-sdpa: transformers without this package; level0, level1, level2: the same script with it.
    With --tp 2: hf-tp2, transformers' own tensor parallelism, and level2-tp2, ours. Exit status 1 when two
    variants disagree, or a figure exceeds what the machine can do.
    """
    settings = Settings(
        arch=arch,
        dtype=dtype,
        prompt=prompt if prompt is not None else 128 if sparse is None else 8192,
        new=new,
        batch=batch,
        variants=(*filter(None, map(str.strip, variants.split(","))), *sharded(tp)),
        tp=tp,
        repeats=repeats,
        threads=usable_cores() if threads is None else threads,
    )
    _check_device(device, modelled)
    if modelled:
        _modelled(settings, card, json_file)
    elif serve is not None:
        _served(settings, at_once(serve), peers_of(peer or ()), json_file, plot, workdir)
    elif sparse is not None:
        _sparse(settings, sparse, trained, json_file)
    else:
        _timed(settings, commands_of(peer or (), settings), json_file, plot, workdir)


def _check_device(device: str, modelled: bool) -> None:
    if (device == "npu") != modelled or device not in ("cpu", "npu"):
        raise ConfigError(
            f"--device is cpu, or npu together with --modelled; found --device {device}"
            f"{' --modelled' if modelled else ''}. Times on a real NPU are not measured by this version."
        )


def _timed(
    settings: Settings,
    peers: Mapping[str, Sequence[str]],
    json_file: str | None,
    plot: Path | None,
    workdir: Path | None,
) -> None:
    check_outputs(json_file, plot, workdir)
    from ..bench import report, runner

    with progress_bar() as progress:
        summary = report.summarise(runner.run(settings, workdir, progress, peers))
    if plot is not None:
        report.plot(summary, plot)
    console = console_for(sys.stderr if json_file == "-" else sys.stdout)
    console.print(tables.bench_table(summary))
    _write_json(summary, json_file)
    for failure in summary["failures"]:
        typer.echo(f"error: {failure}", err=True)
    if summary["failures"]:
        raise typer.Exit(1)


def _served(
    settings: Settings,
    requests: tuple[int, ...],
    peers: Mapping[str, Sequence[str]],
    json_file: str | None,
    plot: Path | None,
    workdir: Path | None,
) -> None:
    """Print what each variant and peer makes of so many requests at once."""
    check_outputs(json_file, plot, workdir)
    if settings.tp > 1 or settings.batch > 1:
        raise ConfigError("--serve is measured on one process, without --tp; its batch is --serve itself.")
    from ..bench.throughput import report, runner

    with progress_bar() as progress:
        summary = report.summarise(*runner.run(settings, requests, peers, workdir, progress))
    if plot is not None:
        report.plot(summary, plot)
    console_for(sys.stderr if json_file == "-" else sys.stdout).print(tables.throughput_table(summary))
    _write_json(summary, json_file)


def _modelled(settings: Settings, card: str, json_file: str | None) -> None:
    """Print what each variant's decode step would take on ``card``."""
    from ..bench import modelled

    check_outputs(json_file, None, None)
    with progress_bar() as progress:
        found = modelled.run(settings, card, progress)
    console_for(sys.stderr if json_file == "-" else sys.stdout).print(tables.modelled_table(found, card))
    figures = [dataclasses.asdict(each) | {"card": card, "modelled": True} for each in found]
    _write_json({"modelled": figures}, json_file)


def _sparse(settings: Settings, share: str, trained: Path | None, json_file: str | None) -> None:
    """Print what block-sparse attention gains and loses."""
    import torch

    from ..bench import sparse
    from ..native import load

    check_outputs(json_file, None, None)
    wanted = with_overrides(CoreSettings(), sparse=share).sparse
    if wanted is None:
        raise ConfigError("--sparse 0 is dense attention; give a share above 0, such as 0.75.")
    text = None if trained is None else trained / "heldout.txt"
    if text is not None and not text.is_file():
        raise ConfigError(f"--trained {trained}: there is no {text}. Put a text there that it has not seen.")
    load()
    torch.set_num_threads(settings.threads)
    gain = sparse.gain(wanted, settings.arch, settings.dtype, settings.prompt, settings.repeats)
    losses = [] if trained is None or text is None else sparse.losses(wanted, trained, text)
    console_for(sys.stderr if json_file == "-" else sys.stdout).print(
        tables.sparse_table(settings, share, gain, losses)
    )
    figures = {"gain": dataclasses.asdict(gain), "losses": [dataclasses.asdict(each) for each in losses]}
    _write_json({"settings": dataclasses.asdict(settings), "sparse": share} | figures, json_file)


def check_outputs(json_file: str | None, plot: Path | None, workdir: Path | None) -> None:
    """Refuse, before minutes are spent, what could not be written after them.

    Raises:
        ConfigError: A folder is missing or not ours to write, or matplotlib is missing.
    """
    if json_file is not None and json_file != "-":
        check_writable("--json", Path(json_file))
    if plot is not None:
        check_writable("--plot", plot)
    if workdir is not None and not workdir.is_dir():
        raise ConfigError(f"--workdir {workdir}: there is no such folder. Make it first.")
    if plot is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise ConfigError(
                "--plot needs matplotlib, which is not installed. pip install 'liteboost_adaptor[bench]'."
            ) from None


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on standard error while something runs; yields what moves it."""
    columns = (
        SpinnerColumn(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    # On standard error, so that the figures can be piped; Rich leaves the bar out where that is no terminal.
    with ProgressBar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def advance(doing: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, description=doing)

        yield advance


def _write_json(summary: dict[str, Any], json_file: str | None) -> None:
    text = json.dumps(summary, indent=2) + "\n"
    if json_file == "-":
        sys.stdout.write(text)
    elif json_file is not None:
        Path(json_file).write_text(text, encoding="utf-8")
