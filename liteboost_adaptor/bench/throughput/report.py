"""Figures of requests that were answered all at once: medians, ratios, and a plot."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from ..report import Measurements, cost_of, facts_of
from ..serving.figures import percentile
from ..settings import BASELINE, ROUNDING
from .runner import Batch


def summarise(measured: Measurements, batches: Sequence[Batch]) -> dict[str, Any]:
    """All figures of a run as JSON types.

    Returns:
        ``requests``: by number of requests and name (as JSON has it, the number is a text) ``tokens_s``,
        output tokens in a second; ``times``, that over transformers without us; ``limit_fraction``, the least
        time the machine allows over what it took; ``peak_fraction``, operations in a second over the GEMM
        peak; ``first_p50_s``, ``next_p50_s`` and ``next_p99_s``, from the begin to the first token and from
        one to the next. None for what an engine does not say. ``peak_rss_mb`` by name; ``machine``,
        ``settings``, ``agreement`` as of `bench.report.summarise`; ``batches`` as they were.
    """
    numbers = sorted({batch.requests for batch in batches})
    names = list(dict.fromkeys(batch.name for batch in batches))
    return {
        **facts_of(measured),
        "requests": {
            str(number): {name: _figures(measured, batches, name, number) for name in names}
            for number in numbers
        },
        "peak_rss_mb": measured.peak_rss_mb,
        "batches": [dataclasses.asdict(batch) for batch in batches],
    }


def _figures(
    measured: Measurements, batches: Sequence[Batch], name: str, requests: int
) -> dict[str, float | None]:
    new = measured.settings.new
    own = [batch for batch in batches if batch.name == name and batch.requests == requests]
    plain = {batch.number: batch for batch in batches if (batch.name, batch.requests) == (BASELINE, requests)}

    def middle(figure: Callable[[Batch], float]) -> float:
        return median(map(figure, own))

    figures: dict[str, float | None] = {
        "tokens_s": middle(lambda batch: requests * new / batch.seconds),
        "times": middle(lambda batch: plain[batch.number].seconds / batch.seconds),
        "limit_fraction": None,
        "peak_fraction": None,
        "first_p50_s": None,
        "next_p50_s": None,
        "next_p99_s": None,
    }
    if name not in ROUNDING:  # the peak is of products in the dtype: those of integers are faster
        figures["limit_fraction"] = middle(lambda batch: least_seconds(measured, name, batch) / batch.seconds)
        figures["peak_fraction"] = middle(
            lambda batch: operations(measured, requests) / batch.seconds / 1e9 / batch.gemm_gflops
        )
    if all(batch.stamps for batch in own):
        figures["first_p50_s"] = middle(lambda batch: percentile([each[0] for each in batch.stamps], 50))
        figures["next_p50_s"] = middle(lambda batch: percentile(_gaps(batch), 50))
        figures["next_p99_s"] = middle(lambda batch: percentile(_gaps(batch), 99))
    return figures


def _gaps(batch: Batch) -> list[float]:
    return [later - sooner for stamps in batch.stamps for sooner, later in pairwise(stamps)]


def operations(measured: Measurements, requests: int) -> float:
    """Floating-point operations of all products of a batch, and of the scores of its prompts."""
    settings, cost = measured.settings, measured.model.cost
    tokens = requests * (settings.new - 1)
    return cost.prefill_flops(requests, settings.prompt) + tokens * (cost.linear_flops + cost.head_flops)


def least_seconds(measured: Measurements, name: str, batch: Batch) -> float:
    """What a batch takes at least, at the limits measured beside it.

    Prompts at the GEMM peak; then steps of a token of each request, which read weights, keys and values once,
    or compute at the peak, whichever takes longer.
    """
    settings, cost = measured.settings, cost_of(measured, name)
    peak, bandwidth = batch.gemm_gflops * 1e9, batch.read_gb_s * 1e9
    step_bytes = cost.decode_bytes(batch.requests, settings.prompt, settings.new)
    step_operations = batch.requests * (cost.linear_flops + cost.head_flops)
    step = max(step_bytes / bandwidth, step_operations / peak)
    return cost.prefill_flops(batch.requests, settings.prompt) / peak + (settings.new - 1) * step


def plot(summary: dict[str, Any], path: Path) -> None:
    """Draw tokens per second over the number of requests, a line for each variant and peer.

    Args:
        summary: From `summarise`.
        path: A ``.png``, ``.svg`` or ``.pdf`` file.
    """
    from matplotlib.figure import Figure  # the object interface: pyplot would look for a display

    settings, machine, rows = summary["settings"], summary["machine"], summary["requests"]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    numbers = [int(number) for number in rows]
    for name in next(iter(rows.values())):
        axis.plot(numbers, [row[name]["tokens_s"] for row in rows.values()], marker="o", label=name)
    axis.set_xscale("log", base=2)
    axis.set_xticks(numbers, list(rows))
    axis.set_xlabel("requests at once")
    axis.set_ylabel("output tokens/s")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8)
    axis.set_title(
        f"{settings['arch']}, {settings['dtype']}, prompt {settings['prompt']}, new {settings['new']}; "
        f"{machine['cpu']}, {machine['threads']} threads",
        fontsize=9,
    )
    figure.savefig(path, dpi=150)
