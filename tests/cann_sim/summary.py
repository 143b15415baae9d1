"""A table of a trace: launches, bytes, FLOPs, copies and synchronisations, a token and a layer."""

from __future__ import annotations

from collections import Counter

from .trace import Trace


def summary(trace: Trace, tokens: int = 1, layers: int = 0) -> str:
    """The table. ``tokens``: generated in the trace; ``layers``: decoder layers that a token passes."""
    units = [("in all", 1)] + ([("a token", tokens)] if tokens > 1 else [])
    if layers:
        units.append(("a token, a layer", tokens * layers))
    rows = [["", *(name for name, _ in units)]]
    for name, value in _totals(trace).items():
        rows.append([name, *(_number(value / by) for _, by in units)])
    lines = _table(rows)
    counts, moved = Counter(trace.ops), Counter()
    for launch in trace.launches:
        moved[launch.op] += launch.bytes
    by_op = [["operator", "launches", "bytes"]]
    by_op += [[op, str(count), f"{moved[op]:,}"] for op, count in counts.most_common()]
    return "\n".join([*lines, "", *_table(by_op)])


def by_label(trace: Trace) -> str:
    """One row for every mark of the trace."""
    rows = [["mark", *_totals(trace)]]
    for label in trace.labels:
        rows.append([label, *(_number(value) for value in _totals(trace.part(label)).values())])
    return "\n".join(_table(rows))


def _totals(trace: Trace) -> dict[str, int]:
    return {
        "launches": len(trace.launches),
        "bytes": trace.bytes,
        "flops": trace.flops,
        "copies to host": len(trace.copies("d2h")),
        "copies to device": len(trace.copies("h2d")),
        "synchronisations": len(trace.synchronisations),
        "collectives": len(trace.of("collective")),
    }


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return lines
