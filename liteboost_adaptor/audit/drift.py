"""What a scanned transformers has that neither the catalogue nor the record knows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..engine.catalogue import Rule
from .record import Record
from .scan import LISTED, PROVABLE, Scan, Target

#: Kinds of differences: of a target the baseline lacks, of one it has with another body, of one it had.
NEW, CHANGED, GONE = "new", "changed", "gone"


@dataclass(frozen=True)
class Difference:
    """Targets with one body that differ from what is known.

    Attributes:
        kind: `NEW`, `CHANGED` or `GONE`.
        digest: Of the body; for `GONE` the one it had.
        rule: Id of the rule that a probe shows to fit it, else ``family.*``, else (gone) empty.
        proved: Whether a probe shows it.
        reason: Why no rule fits.
        targets: Names of the targets.
    """

    kind: str
    digest: str
    rule: str
    proved: bool
    reason: str
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Proposal:
    """Bodies to add to the list of a rule, each proved equal to its replacement by the rule's probe.

    Attributes:
        rule, file: Its id, and where it is written.
        listed: The bodies it has.
        bodies: Those to add.
        targets: Which targets have them.
    """

    rule: str
    file: str
    listed: tuple[str, ...]
    bodies: tuple[str, ...]
    targets: tuple[str, ...]

    @property
    def toml(self) -> str:
        """The line of the rule as it should be, below a comment that says why."""
        bodies = ", ".join(f'"{body}"' for body in self.listed + self.bodies)
        return f"# {self.file}, {self.rule}; proved on {', '.join(self.targets)}\nbodies = [{bodies}]"


@dataclass(frozen=True)
class Drift:
    """The comparison of one scan.

    Attributes:
        version: That was scanned.
        baseline: That it was compared with.
        states: Number of targets by state; ``known``: not served, and the record says so.
        differences: What is new, changed or gone, and not known.
        proposals: For the bodies among them that a probe proved.
        not_imported: Modules that could not be looked at, with the reason.
    """

    version: str
    baseline: str
    states: dict[str, int]
    differences: tuple[Difference, ...]
    proposals: tuple[Proposal, ...]
    not_imported: dict[str, str]

    @property
    def found(self) -> bool:
        return bool(self.differences)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        proposals = [{**asdict(proposal), "toml": proposal.toml} for proposal in self.proposals]
        return {**asdict(self), "proposals": proposals, "drift": self.found}


def compare(scan: Scan, rules: tuple[Rule, ...], record: Record) -> Drift:
    """Sort the targets of ``scan``.

    A target the baseline has and the scan lacks counts only where the scan is not older than the baseline: an
    older version lacks what came later. Modules that could not be imported are not looked at either way.
    """
    before = record.names
    unknown: dict[tuple[str, str, str, bool, str], list[str]] = {}
    states = {LISTED: 0, PROVABLE: 0, "known": 0, "unknown": 0}
    for target in scan.targets:
        state = _state(target, record)
        states[state] += 1
        if state in (PROVABLE, "unknown"):
            kind = CHANGED if target.name in before else NEW
            key = (kind, target.digest, target.rule, state == PROVABLE, target.reason)
            unknown.setdefault(key, []).append(target.name)
    differences = [Difference(*key, tuple(names)) for key, names in sorted(unknown.items())]
    if not record.is_older(scan.version):
        differences += _gone(scan, record)
    return Drift(
        scan.version,
        record.baseline,
        states,
        tuple(differences),
        tuple(_proposals(differences, rules)),
        scan.not_imported,
    )


def _state(target: Target, record: Record) -> str:
    if target.state in (LISTED, PROVABLE):
        return target.state
    return "known" if record.knows(target) else "unknown"


def _gone(scan: Scan, record: Record) -> list[Difference]:
    present = {target.name for target in scan.targets}
    found = []
    for digest, names in sorted(record.targets.items()):
        missing = [n for n in names if n not in present and n.partition(":")[0] not in scan.not_imported]
        if missing:
            found.append(Difference(GONE, digest, "", False, "the baseline has it", tuple(missing)))
    return found


def _proposals(differences: list[Difference], rules: tuple[Rule, ...]) -> list[Proposal]:
    found = []
    for rule in rules:
        proved = [d for d in differences if d.proved and d.rule == rule.id]
        if proved:
            bodies = tuple(dict.fromkeys(d.digest for d in proved))
            targets = tuple(sorted(name for d in proved for name in d.targets))
            found.append(Proposal(rule.id, rule.source, rule.bodies, bodies, targets))
    return found
