"""``python -m cann_sim build``, ``run PROGRAM [ARGUMENTS]``, ``summary TRACE``,
``oracle CHECKOUT ...``, with ``PYTHONPATH=tests``."""

from __future__ import annotations

import argparse
import os
import shutil
import sys

from .build import build
from .environment import environment
from .oracle import report
from .releases import DEFAULT_RELEASE, RELEASES, SOCS
from .summary import by_label, summary
from .trace import read


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cann_sim", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="compile what changed")
    run = commands.add_parser("run", help="run a .py file, -m MODULE or an executable on the simulator")
    run.add_argument("--release", choices=RELEASES, help=f"CANN release ({DEFAULT_RELEASE})")
    run.add_argument("--soc", choices=SOCS, help="generation (910B)")
    run.add_argument("--without", default="", metavar="aclnnX,aclnnY", help="operators to leave out")
    run.add_argument("--broken", action="store_true", help="a libopapi.so that cannot be loaded")
    run.add_argument("program", nargs="*")
    table = commands.add_parser("summary", help="a table of a trace")
    table.add_argument("trace", help="the file that SIMCANN_TRACE named")
    table.add_argument("--tokens", type=int, default=1, help="tokens generated in it")
    table.add_argument("--layers", type=int, default=0, help="decoder layers a token passes")
    commands.add_parser("oracle", help="compare limits with the operators' own unit tests", add_help=False)
    if arguments[:1] == ["oracle"]:
        return report.main(arguments[1:])
    options = parser.parse_args(_program_marked(arguments))
    if options.command == "build":
        sys.stdout.write(f"{build()}\n")
        return 0
    if options.command == "summary":
        trace = read(options.trace)
        parts = [summary(trace, options.tokens, options.layers)] + ([by_label(trace)] if trace.labels else [])
        sys.stdout.write("\n\n".join(parts) + "\n")
        return 0
    if not options.program:
        run.error("a program to run is needed")
    without = [name for name in options.without.split(",") if name]
    variables = environment(options.release, options.soc, without, options.broken)
    first = options.program[0]
    python = first.startswith("-") or first.endswith(".py")
    command = [sys.executable, *options.program] if python else options.program
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    found = shutil.which(command[0], path=path)
    if not found:
        run.error(f"{command[0]} not found")
    os.execve(found, command, variables)


def _program_marked(arguments: list[str]) -> list[str]:
    """``arguments`` with ``--`` before the program, whose own options are not ours."""
    at = 1
    while at < len(arguments) and arguments[at].startswith("--"):
        at += 1 if arguments[at] in ("--broken", "--help") or "=" in arguments[at] else 2
    return [*arguments[:at], "--", *arguments[at:]] if arguments[:1] == ["run"] else arguments


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
