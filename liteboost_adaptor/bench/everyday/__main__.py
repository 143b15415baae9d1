"""``python -m liteboost_adaptor.bench.everyday``: see the package."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from ..settings import usable_cores
from .runner import AT_MOST, NEVER_OVER, measure, table
from .scripts import SCRIPTS


def main(arguments: Iterable[str] | None = None) -> None:
    """Measure, write the table to standard output and, where asked, all figures as JSON to a file."""
    parser = argparse.ArgumentParser(prog="python -m liteboost_adaptor.bench.everyday", description=__doc__)
    parser.add_argument("--scripts", nargs="*", default=list(SCRIPTS), choices=list(SCRIPTS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=min(2, usable_cores()))
    parser.add_argument("--level", default="2", choices=("0", "1", "2"), help="what is compared")
    parser.add_argument("--workdir", type=Path, help="keep the random models here for the next run")
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args(None if arguments is None else list(arguments))
    rows = []
    with TemporaryDirectory() as folder:
        workdir = chosen.workdir or Path(folder)
        for row in measure(chosen.scripts, workdir, chosen.rounds, chosen.threads, chosen.level):
            sys.stderr.write(f"{row.name}: {row.plain_s:.2f} s, {row.ours_s:.2f} s, {row.ratio:.2f}\n")
            rows.append(row)
    sys.stdout.writelines(table(rows))
    less = sum(row.ratio <= AT_MOST for row in rows)
    over = sum(row.ratio > NEVER_OVER for row in rows)
    sys.stdout.write(f"\n{less} of {len(rows)} at most {AT_MOST} times, {over} over {NEVER_OVER}.\n")
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
