"""`make asan`: the fuzzed ops under AddressSanitizer and UndefinedBehaviorSanitizer.

1. Builds the kernels with both sanitizers in a folder of their own, and `tests/csrc/planted_faults.cpp`.
2. Proves that each planted fault is reported, and that the same calls without a fault are not.
3. Runs the table of ops, and what is `fuzz.private`, in a few processes; the first finding ends the job.
4. Runs scenarios of `make tsan` that no table of ops has.
5. Exports a folder, and opens it by the sanitized runner with bytes exchanged (`fuzz.folders`).

Memory from malloc is filled with NaN, so that reading what nobody wrote shows in the results. Nothing but
the kernels is compiled with the sanitizers, but every allocation in the process goes through them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEAST = 20_000
PROCESSES = 2
FOLDERS = 2_000
SCENARIOS = ("programs", "collectives", "paged attention")
ASAN = {
    "detect_leaks": 0,  # the interpreter's own, at exit
    "detect_stack_use_after_return": 1,
    "strict_init_order": 1,
    "malloc_fill_byte": 255,  # NaN in every float format
    "max_malloc_fill_size": 1 << 30,
    "quarantine_size_mb": 64,
    "verify_asan_link_order": 1,
}
UBSAN = {"print_stacktrace": 1, "halt_on_error": 1}


class JobError(RuntimeError):
    """The job cannot run, or found something; the message is the whole report."""


def run(command: list[str], **settings) -> str:
    done = subprocess.run(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, **settings
    )
    if done.returncode:
        raise JobError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-20_000:]}")
    return done.stdout


def build(
    folder: Path,
    options: list[str],
    kind: str = "address",
    planted: str = "planted_faults",
    also: Sequence[str] = (),
) -> None:
    """Configure and build with sanitizers of a ``kind``: the kernels, ``planted``, and ``also`` these."""
    cmake = shutil.which(
        "cmake", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    if cmake is None:
        raise JobError("cmake is needed to build the kernels: pip install cmake")
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=str(Path(cmake).parent)) else []
    options = [f"-DPython_EXECUTABLE={sys.executable}", f"-DLITEBOOST_SANITIZE={kind}", *options]
    run(
        [
            cmake,
            "-S",
            str(ROOT / "kernels"),
            "-B",
            str(folder),
            "-DLITEBOOST_CXX_TESTS=ON",
            *generator,
            *options,
        ]
    )
    targets = ["_C", planted, *also]
    run([cmake, "--build", str(folder), "--parallel", str(PROCESSES), "--target", *targets])


def environment(folder: Path) -> dict[str, str]:
    """For a Python whose process the sanitizers watch."""
    cache = (folder / "CMakeCache.txt").read_text()
    compiler = cache.partition("CMAKE_CXX_COMPILER:")[2].partition("=")[2].partition("\n")[0]
    # libstdc++ too: the sanitizer looks up the function that throws when it starts, before torch is loaded.
    preload = [run([compiler, f"-print-file-name={name}"]).strip() for name in ("libasan.so", "libstdc++.so")]
    if missing := [path for path in preload if not Path(path).is_file()]:
        raise JobError(f"{compiler} has no {', '.join(missing)}; use GCC: CXX=g++ make asan, in a new folder")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LITEBOOST_")}
    python_path = [str(ROOT), str(ROOT / "tests"), kept.get("PYTHONPATH", "")]
    return {
        **kept,
        "LD_PRELOAD": " ".join(preload),
        "ASAN_OPTIONS": ":".join(f"{name}={value}" for name, value in ASAN.items()),
        "UBSAN_OPTIONS": ":".join(f"{name}={value}" for name, value in UBSAN.items()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in python_path if path),
    }


def prove(folder: Path, watched: dict[str, str]) -> list[str]:
    """Names of the planted faults, each of which was found; raises JobError where one was not."""
    command = [sys.executable, "-m", "fuzz.sanitizer_faults", str(folder)]
    return json.loads(run(command, env=watched).splitlines()[-1])


def fuzz(folder: Path, watched: dict[str, str], cases: int) -> dict[str, int]:
    """Run ``cases`` cases in all; how many ran, by op."""
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as scratch:
        running = [_start(folder, watched, cases, number, Path(scratch)) for number in range(PROCESSES)]
        try:
            while any(process.poll() is None for process in running):
                if any(process.poll() for process in running):
                    break
                time.sleep(0.2)
        finally:
            for process in running:
                process.terminate()
                process.wait()
        outputs = [(Path(scratch) / f"{at}.out").read_text(errors="replace") for at in range(PROCESSES)]
        for number, process in enumerate(running):
            if process.returncode not in (0, -signal.SIGTERM):  # those are ended where another one fails
                last = (Path(scratch) / f"{number}.case").read_text(errors="replace").rstrip("\0")
                raise JobError(f"{outputs[number][-20_000:]}\nin the case {last}")
        for output in outputs:
            for name, ran in json.loads(output.splitlines()[-1]).items():
                counts[name] = counts.get(name, 0) + ran
    return counts


def _start(folder: Path, watched: dict[str, str], cases: int, number: int, scratch: Path) -> subprocess.Popen:
    share = -(-cases // PROCESSES)
    command = [
        sys.executable,
        "-m",
        "fuzz.worker",
        str(folder),
        str(share),
        str(number),
        str(scratch / f"{number}.case"),
    ]
    with (scratch / f"{number}.out").open("w") as output:
        return subprocess.Popen(command, env=watched, stdout=output, stderr=subprocess.STDOUT)


def damage(folder: Path, watched: dict[str, str]) -> tuple[int, int]:
    """How many of ``FOLDERS`` changed folders the sanitized runner refused, and how many it ran."""
    plain = {**os.environ, "PYTHONPATH": watched["PYTHONPATH"]}
    # A changed size may ask for more memory than there is, which torch refuses by an error of its own.
    options = f"{watched['ASAN_OPTIONS']}:allocator_may_return_null=1"
    watched = {**watched, "ASAN_OPTIONS": options}
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "fuzz.folders"]
        folders = [f"{scratch}/{number}" for number in range(PROCESSES)]
        run([*command, "export", folders[0]], env=plain)
        for other in folders[1:]:
            shutil.copytree(folders[0], other)
        running = [
            subprocess.Popen(
                [
                    *command,
                    "run",
                    f"{folder}/libliteboost_run.so",
                    each,
                    str(seed),
                    str(FOLDERS // PROCESSES),
                ],
                env=watched,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for seed, each in enumerate(folders)
        ]
        outputs = [process.communicate() for process in running]
    for process, (_, errors) in zip(running, outputs, strict=True):
        if process.returncode:
            raise JobError(
                f"a changed folder ended the runner with {process.returncode}:\n{errors[-20_000:]}"
            )
    refused, ran = (sum(int(output.split()[at]) for output, _ in outputs) for at in (0, 1))
    if refused + ran < FOLDERS or not ran:
        raise JobError(f"only {refused} folders were refused and {ran} ran, of {FOLDERS}")
    return refused, ran


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=24_000)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "sanitized")
    parser.add_argument("--cmake", action="append", default=[], metavar="-DNAME=VALUE")
    arguments = parser.parse_args()
    start = time.monotonic()

    def say(text: str) -> None:
        sys.stdout.write(f"asan: {text} ({time.monotonic() - start:.0f} s)\n")
        sys.stdout.flush()

    try:
        runner = ["-DLITEBOOST_RUNNER=ON", *arguments.cmake]
        build(arguments.build, runner, also=["liteboost_run"])
        say(f"kernels built in {arguments.build}")
        watched = environment(arguments.build)
        planted = prove(arguments.build, watched)
        say(f"{len(planted)} planted faults, all found: {', '.join(planted)}")
        counts = fuzz(arguments.build, watched, arguments.cases)
        say("cases by op: " + ", ".join(f"{name} {ran}" for name, ran in sorted(counts.items())))
        total = sum(counts.values())
        if total < LEAST:
            raise JobError(f"only {total} cases ran, at least {LEAST} are asked for")
        say(f"{total} cases, no finding")
        for scenario in SCENARIOS:
            worker = [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "fuzz.raced_worker",
                str(arguments.build),
                scenario,
            ]
            say(f"{scenario}: {run(worker, env=watched).splitlines()[-1]}, no finding")
        refused, ran = damage(arguments.build, watched)
        say(f"{FOLDERS} changed folders: {refused} refused, {ran} ran, no finding")
    except JobError as fault:
        sys.stderr.write(f"asan: FAILED: {fault}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
