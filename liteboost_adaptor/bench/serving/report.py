"""A table and a plot of servers under load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from .runner import Row


def table(rows: Iterable[Row]) -> Iterator[str]:
    """Markdown, a row for each load and server. Times are in milliseconds, memory in MiB."""
    yield "| load | | tokens/s | times | first part, p50 | p99 | next part, p50 | p99 | memory |\n"
    yield "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
    for row in rows:
        first = next(iter(row.servers.values()))
        for name, figures in row.servers.items():
            times = (figures.first_p50_s, figures.first_p99_s, figures.next_p50_s, figures.next_p99_s)
            yield (
                f"| {row.load} | {name} | {figures.tokens_s:.1f} | {figures.tokens_s / first.tokens_s:.2f} "
                + "".join(f"| {1000 * seconds:.1f} " for seconds in times)
                + f"| {figures.peak_rss_mb:.0f} |\n"
            )


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw tokens per second, and how long the first and the next part of a text are waited for.

    Args:
        rows: Of one or more loads.
        path: A ``.png``, ``.svg`` or ``.pdf`` file.
    """
    from matplotlib.figure import Figure  # the object interface: pyplot would look for a display

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    loads = [str(row.load) for row in rows]
    drawn = (
        ("tokens/s", "tokens_s"),
        ("first part, p99 (s)", "first_p99_s"),
        ("next part, p99 (s)", "next_p99_s"),
    )
    for axis, (title, field) in zip(figure.subplots(1, len(drawn)), drawn, strict=True):
        for name in rows[0].servers:
            axis.plot(loads, [getattr(row.servers[name], field) for row in rows], marker="o", label=name)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("clients, or requests a second")
        axis.set_ylim(bottom=0)
    figure.axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=150)
