"""``python -m liteboost_adaptor.bench.serving path/to/model --at-once 1 4 16``: see the package."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from ...errors import LiteBoostError
from ..settings import usable_cores
from .runner import Load, measure, table


def main(arguments: Iterable[str] | None = None) -> int:
    """Measure, write the table to standard output and, where asked, all figures as JSON to a file."""
    parser = argparse.ArgumentParser(prog="python -m liteboost_adaptor.bench.serving", description=__doc__)
    parser.add_argument("model", type=Path, help="a folder with a model and its tokenizer")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 16], metavar="N", help="clients")
    parser.add_argument("--requests", type=int, default=32, help="texts of a round")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of a text")
    parser.add_argument("--rounds", type=int, default=3, help="of each server")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of each server")
    parser.add_argument("--level", default="2", choices=("0", "1", "2"), help="of the server with us")
    parser.add_argument("--dtype", default="float32", help="of the model")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("options", nargs="*", metavar="OPTION", help="more of both servers, behind --")
    chosen = parser.parse_args(None if arguments is None else list(arguments))
    loads = [Load(clients, chosen.requests, chosen.tokens, chosen.rounds) for clients in chosen.at_once]
    options = ["--dtype", chosen.dtype, *chosen.options]
    rows = []
    try:
        for row in measure(chosen.model, loads, chosen.level, chosen.threads, options):
            sys.stderr.write(
                f"{row.load.at_once} clients: {row.plain.tokens_s:.1f}, {row.ours.tokens_s:.1f}\n"
            )
            rows.append(row)
    except LiteBoostError as fault:
        sys.stderr.write(f"error: {fault}\n")
        return 1
    sys.stdout.writelines(table(rows))
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
