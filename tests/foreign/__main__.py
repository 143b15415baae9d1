"""``python -m foreign``: run the suites, print the table, and write it with ``--write``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import sources
from .check import check
from .suites import EXTRA, SUITES
from .table import document


def main() -> int:
    """Exit status 1 when a failure is ours."""
    names = [suite.name for suite in (*SUITES, *EXTRA)]
    parser = argparse.ArgumentParser(prog="python -m foreign", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(names)}; all but the last")
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 2], choices=[1, 2])
    parser.add_argument("--reuse", action="store_true", help="take finished runs from build/foreign/records")
    parser.add_argument("--write", type=Path, help="write the document here")
    options = parser.parse_args()
    if unknown := set(options.suites) - set(names):
        parser.error(f"no suite is called {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    chosen = [s for s in (*SUITES, *EXTRA) if s.name in options.suites] or list(SUITES)
    sources.WORK.mkdir(parents=True, exist_ok=True)
    entries = []
    for suite in chosen:
        entries.append(check(suite, options.levels, reuse=options.reuse))
        text = document(entries)
        if options.write:  # as far as it has come: a run takes an hour
            options.write.write_text(text)
    sys.stdout.write(text)
    return 1 if any(entry.ours for entry in entries) else 0


if __name__ == "__main__":
    sys.exit(main())
