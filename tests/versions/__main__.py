"""``make test-versions``: the wheel for this machine with other Pythons and torches, and the outcome."""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sandbox import LOOK

from .environment import ROOT, Environment, installed, interpreter, made

#: Python and torch: the oldest, the newest and one torch between with two Pythons each; the others once.
CELLS = (
    ("3.11", "2.13.0"),
    ("3.12", "2.10.0"),
    ("3.12", "2.13.0"),
    ("3.12", "2.15.0"),
    ("3.14", "2.10.0"),
    ("3.14", "2.13.0"),
    ("3.14", "2.15.0"),
    ("3.13", "2.11.0"),
    ("3.13", "2.12.0"),
    ("3.13", "2.14.0"),
    ("3.11", "2.14.1"),
)


@dataclass(frozen=True)
class Outcome:
    """What became of one cell of the table.

    Attributes:
        torch: The version that was there, with what it was built for.
        seconds: Of a processor, to install the wheel once torch is there.
        isa: The instruction set in use, or why there are no kernels.
        ops: pytest's closing words on the tests of ops.
        text: Whether the example's text is the same at all levels.
        fault: The first thing that was wrong, or an empty string.
    """

    torch: str = ""
    seconds: float = 0.0
    isa: str = ""
    ops: str = ""
    text: str = ""
    fault: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """The last columns of its row."""
        return self.isa, self.ops, self.text, self.fault


def main() -> int:
    """Print a table; the status is 1 where a cell that could be made is wrong."""
    parser = argparse.ArgumentParser(prog="python -m versions", description=__doc__)
    parser.add_argument("--wheel", type=Path, help="the newest in dist/ for this machine, if left out")
    parser.add_argument("--cell", nargs="+", metavar="PYTHON/TORCH", help="as 3.12/2.10.0; all, if left out")
    parser.add_argument("--tests", nargs="+", default=["tests/ops"], help="what pytest runs (tests/ops)")
    given = parser.parse_args()
    wheel = (given.wheel or newest_wheel()).absolute()
    cells = [tuple(cell.split("/")) for cell in given.cell] if given.cell else CELLS
    faults = 0
    titles = ("Python", "torch", "to install (CPU)", "kernels", "tests of ops", "text of the example", "")
    sys.stdout.write(f"{wheel.name}\n\n{row(*titles)}{row(*['---'] * len(titles))}")
    for python, torch in cells:
        outcome = tried(python, torch, wheel, given.tests)
        faults += bool(outcome.fault) and outcome.torch != ""
        seconds = f"{outcome.seconds:.1f} s" if outcome.seconds else ""
        sys.stdout.write(row(python, outcome.torch or torch, seconds, *outcome.words))
        sys.stdout.flush()
    return int(faults > 0)


def row(*cells: str) -> str:
    """A row of a table in Markdown."""
    return f"| {' | '.join(cells)} |\n"


def newest_wheel() -> Path:
    """The wheel that `make wheels` made for this machine."""
    found = sorted(
        (ROOT / "dist").glob(f"*manylinux*_{platform.machine()}.whl"), key=lambda path: path.stat().st_mtime
    )
    if not found:
        sys.exit(f"dist/ has no wheel for {platform.machine()}: run `make wheels`, or name one with --wheel")
    return found[-1]


def tried(python: str, torch: str, wheel: Path, tests: list[str]) -> Outcome:
    """One cell, in an environment that is removed afterwards."""
    program = interpreter(python)
    if program is None:
        return Outcome(fault=f"not run: there is no Python {python} here")
    with tempfile.TemporaryDirectory(prefix="versions-") as folder:
        try:
            environment = made(Path(folder) / "environment", program, torch)
        except subprocess.CalledProcessError as fault:
            return Outcome(fault=f"not run: `{' '.join(fault.cmd[1:5])} …` ended with {fault.returncode}")
        return outcome_in(environment, wheel, tests)


def outcome_in(environment: Environment, wheel: Path, tests: list[str]) -> Outcome:
    """Install the wheel, look what it says of itself, run tests of ops and the example."""
    seconds = installed(environment, wheel)
    looked = environment.run("-c", LOOK)
    if looked.returncode != 0:
        return Outcome("?", seconds, fault=looked.stderr.strip().splitlines()[-1])
    look = json.loads(looked.stdout)
    version = environment.run("-c", "import torch; print(torch.__version__)").stdout.strip()
    if not look["loaded"] or look["warnings"] or look["value"] != 3.0 or look["bound"] != 1:
        return Outcome(version, seconds, fault=str(look["reason"] or look["warnings"] or look))
    places = [str(ROOT / place) for place in tests]
    how = ["-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    ran = environment.run("-m", "pytest", *how, *places)
    (closing,) = re.findall(r"^(?:=+ )?(\d+ (?:passed|failed).*?) in ", ran.stdout, re.MULTILINE) or [
        ran.stdout[-200:]
    ]
    text = demo(environment)
    fault = (
        ""
        if ran.returncode == 0
        else "; ".join(re.findall(r"^(?:FAILED|ERROR) (.*)$", ran.stdout, re.MULTILINE)[:3])
    )
    return Outcome(
        version, seconds, str(look["isa"]), closing, text, fault or ("" if text == "the same" else text)
    )


def demo(environment: Environment) -> str:
    """Whether `make demo`'s text is the same without us and at all levels."""
    # One thread: those of four processes would wait for each other.
    done = environment.run(ROOT / "examples" / "demo.py", "--rounds", 1, OMP_NUM_THREADS="1")
    return "the same" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["different"])[-1]


if __name__ == "__main__":
    sys.exit(main())
