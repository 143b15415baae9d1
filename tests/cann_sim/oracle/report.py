"""Compares the simulator's limits with what the operators' own unit tests expect of them.

    python -m cann_sim oracle OPS_NN OPS_TRANSFORMER [--release 9.1.0] [--operator aclnnMm] [--list]

Each path is a git directory (bare or not) of CANN's operators whose branches or tags are releases. Nothing of
it is kept.
"""

from __future__ import annotations

import argparse
import pickle
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..environment import environment
from .overruled import overruling
from .sets import sets_of
from .tilings import arguments_of, operator_of, tilings
from .tokens import Unreadable
from .values import ParameterSet

#: release that is simulated -> the names of its sources, the first that a checkout has
SOURCES = {
    "8.5.0": ("8.5.0", "v8.5.0"),
    "9.0.0": ("9.0.0", "v9.0.0"),
    "9.1.0": ("9.1.0", "v9.1.0"),
    "9.2.0": ("master",),
}
#: SoCs whose limits are simulated whole; of a 950 they are those of a 910B with a few more.
JUDGED = ("910B", "910C", "310P")
_LIMITS = Path(__file__).resolve().parents[1] / "limits"
_TESTS = re.compile(r"(?!experimental/).*/tests/ut/op_(host|api)/(?!.*infershape).*\.cpp\Z")


@dataclass
class Agreement:
    """Of one operator: every set that its tests have for a SoC that is simulated."""

    agreed: int = 0
    #: name, what the test expects, what the simulator says
    disagreed: list[tuple[str, str, str]] = field(default_factory=list)
    #: name, the check that refuses what the tested one accepts
    overruled: list[tuple[str, str]] = field(default_factory=list)
    #: name, why it is no call of the simulator
    untranslatable: list[tuple[str, str]] = field(default_factory=list)
    #: sets for another SoC, or whose test expects nothing of the arguments
    elsewhere: int = 0

    @property
    def read(self) -> int:
        judged = self.agreed + len(self.disagreed) + len(self.overruled)
        return judged + len(self.untranslatable) + self.elsewhere


def limited() -> set[str]:
    """The operators that the simulator has limits of."""
    return {
        name for path in _LIMITS.glob("*.cpp") for name in re.findall(r"LIMITS\((aclnn\w+)", path.read_text())
    }


def compare(checkouts: Iterable[Path], release: str, only: str = "") -> dict[str, Agreement]:
    """Operator -> how far its limits in ``release`` agree with the unit tests of that release."""
    wanted = {name for name in limited() if re.fullmatch(only or ".*", name)}
    found: dict[str, Agreement] = {}
    pending: dict[str, list[tuple[ParameterSet, str]]] = {}
    for checkout in checkouts:
        for path, sets, failures in read(checkout, release, wanted):
            for one in sets:
                operator = operator_of(one.operator)
                if operator not in wanted:
                    continue
                agreement = found.setdefault(operator, Agreement())
                if one.soc not in JUDGED or one.accepted is None:
                    agreement.elsewhere += 1
                else:
                    pending.setdefault(one.soc, []).append((one, path))
            for name, reason in failures:
                found.setdefault(_about(path, wanted), Agreement()).untranslatable.append(
                    (f"{path}: {name}", reason)
                )
    for soc, sets in pending.items():
        _judge(sets, release, soc, found)
    return found


def _about(path: str, wanted: set[str]) -> str:
    """The operator that a file of tests is about, by its name."""
    plain = path.rsplit("/", 1)[-1].replace("_", "").lower()
    names = {operator: operator for operator in wanted} | {name: operator_of(name) for name in tilings()}
    fitting = [name for name in names if name.removeprefix("aclnn").lower() in plain]
    return names[max(fitting, key=len)] if fitting else path


def read(
    checkout: Path, release: str, wanted: set[str]
) -> Iterator[tuple[str, list[ParameterSet], list[tuple[str, str]]]]:
    """Of each file of tests about operators ``wanted``: its path, its sets, what cannot be followed."""
    source = next(
        (name for name in SOURCES[release] if _git(checkout, "rev-parse", "--verify", "-q", name)), None
    )
    if source is None:
        return
    names = {*wanted, *(name for name in tilings() if operator_of(name) in wanted)}
    asked = [word for name in sorted(names) for word in ("-e", name)]
    listed = _git(checkout, "grep", "-lF", *asked, source, "--", "*/tests/ut/*.cpp").splitlines()
    for path in filter(_TESTS.match, (line.partition(":")[2] for line in listed)):
        text = _git(checkout, "show", f"{source}:{path}")
        folder = path.rsplit("/", 1)[0]

        def table(name: str, folder: str = folder) -> str | None:
            return _git(checkout, "show", f"{source}:{folder}/{name.rsplit('/', 1)[-1]}") or None

        # An operator of the graph engine is named in a string, an aclnn function is called.
        if names & set(re.findall(r'(?<=")\w+(?=")|aclnn\w+?(?=GetWorkspaceSize|\b)', text)):
            yield path, *sets_of(text, path, table)


def _judge(sets: list[tuple[ParameterSet, str]], release: str, soc: str, found: dict[str, Agreement]) -> None:
    calls, called = [], []
    for one, path in sets:
        try:
            calls.append((operator_of(one.operator), arguments_of(one)))
            called.append((one, path))
        except Unreadable as reason:
            found[operator_of(one.operator)].untranslatable.append((f"{path}: {one.name}", str(reason)))
    answers = _phase1(calls, release, soc)
    for (one, path), (answer, why) in zip(called, answers, strict=True):
        agreement, name = found[operator_of(one.operator)], f"{path}: {one.name} [{soc}]"
        if answer == "untranslatable":
            agreement.untranslatable.append((name, why))
        elif (answer == "accepted") == one.accepted:
            agreement.agreed += 1
        elif one.accepted and (other := overruling(operator_of(one.operator), why)):
            agreement.overruled.append((name, other.source))
        else:
            agreement.disagreed.append((name, one.expected, why or answer))


def _phase1(calls: list[tuple[str, list[object]]], release: str, soc: str) -> list[tuple[str, str]]:
    variables = environment(release, soc) | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-m", "cann_sim.oracle.phase1"]
    done = subprocess.run(
        command, input=pickle.dumps(calls), stdout=subprocess.PIPE, env=variables, check=True
    )
    return pickle.loads(done.stdout)


def _git(checkout: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(checkout), *arguments], capture_output=True, check=False)
    return done.stdout.decode(errors="replace")


def table(found: dict[str, Agreement], release: str) -> str:
    columns = ["read", "elsewhere", "not translatable", "overruled", "agree", "disagree", ""]
    rows = [f"| CANN {release} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    total = Agreement()
    for operator, one in sorted(found.items()):
        rows.append(_row(operator, one))
        total.agreed += one.agreed
        total.disagreed += one.disagreed
        total.untranslatable += one.untranslatable
        total.overruled += one.overruled
        total.elsewhere += one.elsewhere
    return "\n".join([*rows, _row("all", total)])


def _row(name: str, one: Agreement) -> str:
    judged = one.agreed + len(one.disagreed)
    share = f"{100 * one.agreed / judged:.0f} %" if judged else ""
    lists = [len(one.untranslatable), len(one.overruled), one.agreed, len(one.disagreed)]
    counts = [one.read, one.elsewhere, *lists]
    return f"| {name} | {' | '.join(map(str, counts))} | {share} |"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cann_sim oracle", description=__doc__)
    parser.add_argument("checkouts", nargs="+", type=Path, metavar="CHECKOUT")
    parser.add_argument("--release", choices=SOURCES, action="append", help="default: all of them")
    parser.add_argument("--operator", default="", help="a regular expression of names of aclnn functions")
    parser.add_argument("--list", action="store_true", help="also what is overruled or cannot be translated")
    options = parser.parse_args(arguments)
    for release in options.release or SOURCES:
        found = compare(options.checkouts, release, options.operator)
        lines = [table(found, release), ""]
        for operator, one in sorted(found.items()):
            lines += [
                f"{operator}: {name}: expects {expected}; {why}" for name, expected, why in one.disagreed
            ]
            if options.list:
                lines += [f"{operator}: {name}: overruled by {why}" for name, why in one.overruled]
                lines += [f"{operator}: {name}: not translatable: {why}" for name, why in one.untranslatable]
        sys.stdout.write("\n".join(lines) + "\n\n")
        sys.stdout.flush()
    return 0
