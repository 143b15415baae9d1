"""Add bodies to rules where they are written, leaving every other character of the file alone."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from ..engine import catalogue
from ..errors import AuditError
from .drift import Proposal

_LIST = re.compile(r"^bodies = \[([^\]]*)\]", re.MULTILINE)


def write(proposal: Proposal) -> Path:
    """Add the bodies of ``proposal`` to its rule.

    Returns:
        The file.

    Raises:
        AuditError: It cannot be read or written, or does not become what was meant.
    """
    file = _path(proposal.file)
    try:
        text = file.read_text(encoding="utf-8")
        file.write_text(with_bodies(text, proposal.rule, proposal.bodies), encoding="utf-8")
    except OSError as fault:
        raise AuditError(
            f"{file}: bodies cannot be added ({fault}). Audit from a writable checkout."
        ) from fault
    return file


def with_bodies(text: str, rule: str, bodies: tuple[str, ...]) -> str:
    """The text of a rule file with ``bodies`` added to the list of ``rule``.

    Raises:
        AuditError: The rule is not found as it is usually written, or the result says something else.
    """
    before = {entry.id: entry for entry in catalogue.parse(text, rule)}
    start = re.search(rf'^id = "{re.escape(rule)}"', text, re.MULTILINE)
    if rule not in before or start is None:
        raise AuditError(f"no rule is written as id = {rule!r} in its file. Add the bodies by hand.")
    bodies = tuple(body for body in bodies if body not in before[rule].bodies)
    if not bodies:
        return text
    end = text.find("[[rule]]", start.start())
    section = text[start.start() : end if end >= 0 else len(text)]
    added = ", ".join(f'"{body}"' for body in bodies)
    if _LIST.search(section):
        changed = _LIST.sub(lambda found: f"bodies = [{_joined(found.group(1), added)}]", section, count=1)
    else:
        head, newline, rest = section.partition("\n")
        changed = f"{head}{newline}bodies = [{added}]\n{rest}"
    result = text.replace(section, changed, 1)
    wanted = {**before, rule: replace(before[rule], bodies=before[rule].bodies + bodies)}
    if {entry.id: entry for entry in catalogue.parse(result, rule)} != wanted:
        raise AuditError(f"the bodies of {rule} are written in an unusual way. Add them by hand.")
    return result


def _joined(listed: str, added: str) -> str:
    kept = listed.rstrip().rstrip(",")
    return f"{kept}, {added}" if kept.strip() else added


def _path(source: str) -> Path:
    """The file of a rule's ``source``, which names shipped files relative to the package."""
    if Path(source).is_absolute() or not source.startswith("patches/"):
        return Path(source)
    package = Path(catalogue.__file__).resolve().parents[1]
    inside = package / source
    return inside if inside.is_file() else package.parent / source
