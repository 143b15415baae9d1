"""``PYTHONPATH=tests python -m program.soundness --count 20000 --seed 1 --jobs 2``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from . import campaign, execute
from .idiom import catalogue
from .program import Program, alone, bases_of


def main() -> int:
    """Run a campaign, one idiom alone, or programs from a file. The status is 1 where something differs."""
    parser = argparse.ArgumentParser(prog="python -m program.soundness", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="programs to compose")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--out", type=Path, help="a file for programs that differ, as JSON")
    parser.add_argument("--replay", type=Path, help="a file of such programs, to be run again")
    parser.add_argument("--idioms", nargs="*", help="run each of these alone on every model; none named: all")
    parser.add_argument("--one-base", action="store_true", help="with --idioms: on the first model only")
    parser.add_argument("--source", action="store_true", help="with --replay: print the text of the programs")
    parser.add_argument("--control", action="store_true", help="no recorded steps: nothing may differ")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        campaign.work(options.count, options.seed, options.worker, options.control)
        return 0
    if options.replay:
        return _replay(json.loads(options.replay.read_text()), options.source)
    if options.idioms is not None:
        bases = 1 if options.one_base else None
        return _alone(options.idioms or sorted(catalogue()), bases, options.control)
    with tempfile.TemporaryDirectory(prefix="soundness-") as folder:
        summary = campaign.campaign(options.count, options.seed, options.jobs, Path(folder), options.control)
    sys.stdout.writelines(f"{line}\n" for line in summary.lines())
    if options.out:
        options.out.write_text(json.dumps(summary.findings, indent=1) + "\n")
    return int(bool(summary.findings))


def _replay(findings: list[dict[str, object]], with_source: bool) -> int:
    different = 0
    for found in findings:
        program = Program.of(found["program"])
        if with_source:
            sys.stdout.write(program.source() + "\n")
        different += _shown(" + ".join(choice.idiom for choice in program.choices), program)
    sys.stdout.write(f"{different} of {len(findings)} differ\n")
    return int(different > 0)


def _alone(names: list[str], bases: int | None, control: bool) -> int:
    found = [_shown(name, alone(name, base), control) for name in names for base in bases_of(name)[:bases]]
    sys.stdout.write(f"{sum(found)} of {len(found)} differ\n")
    return int(any(found))


def _shown(title: str, program: Program, control: bool = False) -> bool:
    outcome = execute.run(program, control)
    notes = [
        f"recorded: {outcome.recorded}" if outcome.recorded else "",
        f"served: {outcome.served}" if outcome.served else "",
        f"counts: {outcome.counts}" if outcome.counts else "",
        f"shadow check: {outcome.shadow}" if outcome.shadow else "",
        f"raises {', '.join(outcome.raised)}" if outcome.raised else "",
        f"not recorded: {outcome.reasons[0]}" if outcome.reasons else "",
    ]
    detail = "; ".join(note for note in notes if note)
    sys.stdout.write(f"{title} on {program.base}: {outcome.replays} replays; {detail}\n")
    sys.stdout.flush()
    return bool(outcome.fault)


if __name__ == "__main__":
    sys.exit(main())
