"""CANN releases and SoCs that are simulated, and the operators that a release lacks."""

from __future__ import annotations

import re
from pathlib import Path

#: The last is what the operators' master branches hold; limits name it where they differ from 9.1.0.
RELEASES = ("8.1.RC1", "8.5.0", "9.0.0", "9.1.0", "9.2.0")
#: The release that the torch_npu in use is paired with: COMPATIBILITY.md of Ascend/pytorch ends with 2.12,
#: for which it names this one.
DEFAULT_RELEASE = "9.1.0"
#: What a generation is called here -> the name that torch_npu asks the runtime for.
SOCS = {
    "910B": "Ascend910B2",
    "910C": "Ascend910_9391",
    "310P": "Ascend310P3",
    "950": "Ascend950PR_9589",
}
DEFAULT_SOC = "910B"

_TABLE = Path(__file__).parent / "opapi" / "availability.inc"
_ROW = re.compile(r'^AVAILABLE\((\w+), "([^"]+)", "([^"]+)"\)$', re.MULTILINE)


def availability() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Operator -> its first release and the SoCs that run it, for those not in every release on every SoC."""
    return {name: (first, tuple(socs.split())) for name, first, socs in _ROW.findall(_TABLE.read_text())}


def absent_in(release: str) -> list[str]:
    """The operators in the table that ``release`` does not have yet."""
    if release not in RELEASES:
        raise ValueError(f"CANN release {release!r} is not simulated; one of {', '.join(RELEASES)}")
    order = RELEASES.index(release)
    return sorted(name for name, (first, _) in availability().items() if RELEASES.index(first) > order)
