"""``python -m liteboost_adaptor.bench.serving path/to/model --at-once 1 4 16``: see the package."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from ...errors import LiteBoostError
from ..settings import usable_cores
from .report import plot, table
from .runner import OURS, PLAIN, Load, measure
from .server import PORT, transformers_command


def main(arguments: Iterable[str] | None = None) -> int:
    """Measure, write the table to standard output and, where asked, figures and plot to files."""
    parser = _parser()
    chosen = parser.parse_args(None if arguments is None else list(arguments))
    if not (chosen.at_once or chosen.rate):
        parser.error("nothing is asked for: give --at-once or --rate a number")
    if chosen.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'liteboost_adaptor[bench]'")
    common = (chosen.requests, chosen.tokens, chosen.rounds)
    loads = [Load(clients, *common) for clients in chosen.at_once]
    loads += [Load(None, *common, rate) for rate in chosen.rate]
    options = ["--dtype", chosen.dtype, *chosen.options]
    commands = {
        PLAIN: transformers_command(chosen.model, None, options),
        OURS: transformers_command(chosen.model, chosen.level, options),
        **dict(chosen.peer),
    }
    rows = []
    try:
        for row in measure(commands, loads, chosen.threads, same_texts=chosen.texts == "same"):
            speeds = ", ".join(f"{name} {figures.tokens_s:.1f}" for name, figures in row.servers.items())
            sys.stderr.write(f"load {row.load}: {speeds}\n")
            rows.append(row)
    except LiteBoostError as fault:
        sys.stderr.write(f"error: {fault}\n")
        return 1
    sys.stdout.writelines(table(rows))
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if chosen.plot:
        plot(rows, chosen.plot)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m liteboost_adaptor.bench.serving", description=__doc__)
    parser.add_argument("model", type=Path, help="a folder with a model and its tokenizer")
    parser.add_argument("--at-once", type=int, nargs="*", default=[1, 4, 16], metavar="N", help="clients")
    parser.add_argument(
        "--rate", type=_rate, nargs="*", default=[], help="requests a second that arrive at random, as well"
    )
    parser.add_argument("--requests", type=int, default=32, help="texts of a round")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of a text")
    parser.add_argument("--rounds", type=int, default=3, help="of each server")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of each server")
    parser.add_argument("--level", default="2", choices=("0", "1", "2"), help="of the server with us")
    parser.add_argument("--dtype", default="float32", help="of the model")
    parser.add_argument(
        "--texts",
        choices=("same", "any"),
        default="same",
        help="whether greedy texts must be those without us",
    )
    parser.add_argument(
        "--peer",
        type=_peer,
        action="append",
        default=[],
        metavar=f"'NAME=COMMAND --port {PORT}'",
        help="another server of /v1/completions, such as llama-server",
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plot", type=Path, help="draw them here")
    parser.add_argument("options", nargs="*", metavar="OPTION", help="more of both servers, behind --")
    return parser


def _rate(text: str) -> float:
    rate = float(text)
    if not rate > 0:
        raise argparse.ArgumentTypeError(f"a rate is above 0; found {text}")
    return rate


def _peer(text: str) -> tuple[str, list[str]]:
    name, _, command = text.partition("=")
    if name in ("", PLAIN, OURS) or PORT not in command:
        raise argparse.ArgumentTypeError(
            f"give NAME=COMMAND with {PORT} in the command and a name of its own; found {text!r}"
        )
    return name, shlex.split(command)


if __name__ == "__main__":
    sys.exit(main())
