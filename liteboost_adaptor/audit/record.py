"""What was seen at the last audit: every target of the baseline, and what other versions have beside it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import InvalidVersion, Version

from ..errors import AuditError
from .scan import UNKNOWN, Scan, Target

FILE = Path(__file__).with_name("record.json")

#: Digest of a body -> the targets that have it.
Bodies = dict[str, list[str]]


@dataclass
class Record:
    """The bodies somebody has looked at.

    Attributes:
        baseline: Version that the others are compared with.
        targets: Its targets, by the digest of their body.
        others: Version -> what it has beside: bodies that the catalogue does not list.
    """

    baseline: str = "0"
    targets: Bodies = field(default_factory=dict)
    others: dict[str, Bodies] = field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        """Targets of the baseline."""
        return frozenset(name for names in self.targets.values() for name in names)

    def knows(self, target: Target) -> bool:
        """Whether this body was seen: at this target if the baseline has the target, else at any."""
        if not target.digest:
            return False
        seen = [bodies.get(target.digest, ()) for bodies in (self.targets, *self.others.values())]
        return any(target.name in names if target.name in self.names else names for names in seen)

    def is_older(self, version: str) -> bool:
        """Whether ``version`` came before the baseline, so that what it lacks is no loss."""
        return _order(version) < _order(self.baseline)

    def note(self, scan: Scan) -> None:
        """Remember a scan; one that is not older than the baseline becomes the baseline."""
        self.others.pop(scan.version, None)
        if self.is_older(scan.version):
            unknown = _by_digest(t for t in scan.targets if t.state == UNKNOWN and not self.knows(t))
            self.others.update({scan.version: unknown} if unknown else {})
            return
        former, self.targets = (self.baseline, self.targets), _by_digest(scan.targets)
        gone = {digest: names for digest, names in former[1].items() if digest not in self.targets}
        if former[0] != scan.version and gone:
            self.others[former[0]] = gone
        self.baseline = scan.version

    def to_json(self) -> str:
        others = {version: self.others[version] for version in sorted(self.others, key=_order)}
        values = {"baseline": self.baseline, "targets": self.targets, "others": others}
        return json.dumps(values, indent=1, sort_keys=False) + "\n"


def load(file: Path | None = None) -> Record:
    """The record that is shipped.

    Raises:
        AuditError: It is missing or not what `Record.to_json` writes.
    """
    file = file or FILE
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return Record(values["baseline"], values["targets"], values["others"])
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise AuditError(
            f"{file}: the record of the last audit cannot be read ({fault}). Install the package again."
        ) from fault


def save(record: Record, file: Path | None = None) -> None:
    """Write ``record`` over the one that is shipped.

    Raises:
        AuditError: The file cannot be written.
    """
    file = file or FILE
    try:
        file.write_text(record.to_json(), encoding="utf-8")
    except OSError as fault:
        raise AuditError(
            f"{file}: the record cannot be written ({fault}). Audit from a writable checkout."
        ) from fault


def _by_digest(targets: Iterable[Target]) -> Bodies:
    found: Bodies = {}
    for target in targets:
        found.setdefault(target.digest, []).append(target.name)
    return {digest: sorted(found[digest]) for digest in sorted(found)}


def _order(version: str) -> Version:
    try:
        return Version(version)
    except InvalidVersion:
        return Version("0")
