"""One process of `sanitized`: ``python -m fuzz.worker BUILD_FOLDER CASES NUMBER FILE``, its case in FILE."""

from __future__ import annotations

import json
import os
import sys

import torch


def main(folder: str, cases: str, number: str, case_file: str) -> None:
    # Before the package looks for a library of its own.
    torch.ops.load_library(f"{folder}/_C.so")
    torch.set_num_threads(1)
    from fuzz import private, run, table

    file = os.open(case_file, os.O_CREAT | os.O_WRONLY)

    def note(text: str) -> None:
        # The sanitizers end the process: what it was at must be on disk.
        os.ftruncate(file, 0)
        os.pwrite(file, text.encode(), 0)

    names = sorted(table.load())
    each = -(-int(cases) // (len(names) + len(private.NAMES)))
    # One case in five is of arguments to be refused.
    counts = {
        name: run.valid(name, each - each // 5, 10 + int(number), note)
        + run.spoiled(name, each // 5, 10 + int(number), note)
        for name in names
    }
    for name in private.NAMES:
        counts[name] = private.run_cases(name, each, 10 + int(number), note)
    sys.stdout.write(json.dumps(counts) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
