"""`make tsan`: what runs in several threads at once, under ThreadSanitizer.

1. Builds the kernels with it in a folder of their own, and `tests/csrc/planted_races.cpp`.
2. Proves that each planted race is reported, and that the same calls without one are not.
3. Runs each scenario of `fuzz.raced_worker` in a process; the first finding ends the job.

Nothing but the kernels is compiled with the sanitizer. What it could report of others (memory that torch
writes) is left out by ``ignore_noninstrumented_modules``. It does not see how OpenMP has threads
wait for each other, so the parallel regions of the kernels take their own here (`common/resources.h`).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sanitized import ROOT, JobError, build, run

#: As in `fuzz.raced_worker`, which is imported where torch is.
PLANTED = (
    "a counter of several threads",
    "an element that all parts of a region write",
    "memory read without order",
)
SCENARIOS = ("programs", "recorded steps", "paged attention", "collectives", "ops")
#: Who writes to what is the same with every instruction set; one compiles in a third of the time.
ONE_SET = ("-DLB_X86_ISAS=OFF", "-DLB_ARM_ISAS=OFF", "-DLITEBOOST_NPU=OFF")
TSAN = {
    "halt_on_error": 1,
    "exitcode": 66,
    "ignore_noninstrumented_modules": 1,
    "report_signal_unsafe": 0,
    "second_deadlock_stack": 1,
    "history_size": 4,
}


def environment(folder: Path) -> dict[str, str]:
    """For a Python whose process the sanitizer watches."""
    cache = (folder / "CMakeCache.txt").read_text()
    compiler = cache.partition("CMAKE_CXX_COMPILER:")[2].partition("=")[2].partition("\n")[0]
    library = run([compiler, "-print-file-name=libtsan.so"]).strip()
    if not Path(library).is_file():
        raise JobError(f"{compiler} has no libtsan.so; use GCC: CXX=g++ make tsan, in a new folder")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LITEBOOST_")}
    python_path = [str(ROOT), str(ROOT / "tests"), kept.get("PYTHONPATH", "")]
    return {
        **kept,
        "LD_PRELOAD": library,
        "TSAN_OPTIONS": ":".join(f"{name}={value}" for name, value in TSAN.items()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in python_path if path),
    }


def prove(worker: list[str], watched: dict[str, str]) -> Sequence[str]:
    """Names of the planted races, each of which was found; raises JobError where one was not."""
    for name in PLANTED:
        run([*worker, f"sound: {name}"], env=watched)
        done = subprocess.run(
            [*worker, f"planted: {name}"], env=watched, text=True, capture_output=True, check=False
        )
        if done.returncode != TSAN["exitcode"] or "ThreadSanitizer: data race" not in done.stderr:
            raise JobError(f"{name} was not found; it ended with {done.returncode}:\n{done.stderr[-20_000:]}")
    return PLANTED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "raced")
    parser.add_argument("--cmake", action="append", default=[], metavar="-DNAME=VALUE")
    parser.add_argument("--scenario", action="append", choices=SCENARIOS)
    arguments = parser.parse_args()
    start = time.monotonic()

    def say(text: str) -> None:
        sys.stdout.write(f"tsan: {text} ({time.monotonic() - start:.0f} s)\n")
        sys.stdout.flush()

    try:
        build(arguments.build, [*ONE_SET, *arguments.cmake], "thread", "planted_races")
        say(f"kernels built in {arguments.build}")
        watched = environment(arguments.build)
        worker = [sys.executable, "-W", "ignore", "-m", "fuzz.raced_worker", str(arguments.build)]
        planted = prove(worker, watched)
        say(f"{len(planted)} planted races, all found: {', '.join(planted)}")
        for scenario in arguments.scenario or SCENARIOS:
            say(f"{scenario}: {run([*worker, scenario], env=watched).splitlines()[-1]}, no finding")
    except JobError as fault:
        sys.stderr.write(f"tsan: FAILED: {fault}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
