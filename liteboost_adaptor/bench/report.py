"""Figures made of a benchmark's measurements: medians, ratios, fractions of limits, JSON, and a plot."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from .settings import BASELINE, INT8_CACHES, ROUNDING, Settings, sharded

if TYPE_CHECKING:
    from .agreement import Agreement
    from .models import BenchModel, Cost

#: A variant cannot be faster than the machine; a little over one is the noise of two measurements.
MOST_FRACTION = 1.03


@dataclass(frozen=True)
class Round:
    """Seconds of one ``generate`` of one variant; rounds of equal ``index`` were run side by side.

    Attributes:
        read_gb_s: The better read bandwidth of those measured right before and right behind it.
        gemm_gflops: The better rate of a matrix product, likewise.
    """

    variant: str
    index: int
    prefill_s: float
    decode_s: float
    read_gb_s: float
    gemm_gflops: float


@dataclass(frozen=True)
class Measurements:
    """All that was seen in a run, before any figure is made of it.

    Attributes:
        settings: What was asked.
        model: The weight file and what a pass over it must cost.
        groups: Variants that were in memory together.
        agreements: By variant, the comparison that was passed.
        rounds: In the order they were run.
        read_gb_s: Best read bandwidth seen, 10^9 bytes per second.
        gemm_gflops: Best rate of a matrix product seen, 10^9 operations per second.
        facts: By variant, libraries and instruction set.
        peak_rss_mb: By variant, most memory ever held, MiB.
        statuses: By level, what our rules did.
        peers: Names of engines that are not ours, measured beside the variants.
    """

    settings: Settings
    model: BenchModel
    groups: list[tuple[str, ...]]
    agreements: dict[str, Agreement]
    rounds: list[Round]
    read_gb_s: float
    gemm_gflops: float
    facts: dict[str, dict[str, Any]]
    peak_rss_mb: dict[str, float]
    statuses: dict[str, dict[str, Any]]
    peers: tuple[str, ...] = ()


def summarise(measured: Measurements) -> dict[str, Any]:
    """All figures of a run as JSON types.

    Returns:
        ``machine`` (cpu, threads, isa, read_gb_s, gemm_gflops); ``variants`` by name (prefill_tok_s,
        decode_tok_s, prefill_ratio, decode_ratio, decode_bandwidth_fraction, decode_bandwidth_beside,
        prefill_peak_fraction, prefill_peak_beside, peak_rss_mb), ``peers`` likewise; ``divided``: of a model
        sharded over processes, its speed in both phases over one process with all threads and over
        transformers' own way;
        ``settings``, ``agreement``, ``groups`` and ``rounds`` as they were; ``notes`` on what a reader should
        know; ``failures``, empty unless a figure is impossible.
    """
    settings = measured.settings
    variants = {name: _variant(measured, name) for name in settings.variants}
    peers = {name: _variant(measured, name) for name in measured.peers}
    return {
        **facts_of(measured),
        "variants": variants,
        "peers": peers,
        "divided": _sharded(measured),
        "groups": [list(group) for group in measured.groups],
        "rounds": [vars(one) for one in measured.rounds],
        "notes": _notes(measured),
        "failures": _failures(variants),
    }


def facts_of(measured: Measurements) -> dict[str, Any]:
    """What a run was made on and of: ``machine``, ``settings`` and ``agreement`` of `summarise`."""
    settings = measured.settings
    return {
        "machine": {
            "cpu": cpu_name(),
            "threads": settings.threads,
            "isa": _isa(measured),
            "read_gb_s": measured.read_gb_s,
            "gemm_gflops": measured.gemm_gflops,
        },
        "settings": {
            "arch": measured.model.name,
            **{
                name: getattr(settings, name)
                for name in ("dtype", "prompt", "new", "batch", "repeats", "threads", "tp", "seed")
            },
            **{name: measured.facts[BASELINE].get(name) for name in ("torch", "transformers")},
        },
        "agreement": {name: vars(agreement) for name, agreement in measured.agreements.items()},
    }


def cost_of(measured: Measurements, name: str) -> Cost:
    """What a pass of one variant costs: of its quantized weights, keys and values, if it has them."""
    cost = measured.model.cost
    if counted := measured.facts.get(name, {}).get("token_bytes"):
        cost = replace(cost, token_bytes=sum(counted.values()))
    if name in INT8_CACHES and cost.head_dim:
        from ..ops.int8_attention import SCALE_BYTES  # imports torch

        cost = replace(cost, kv_itemsize=(cost.head_dim + SCALE_BYTES) / cost.head_dim)
    return cost


def _variant(measured: Measurements, name: str) -> dict[str, float]:
    settings, cost = measured.settings, cost_of(measured, name)
    rounds = [one for one in measured.rounds if one.variant == name]
    prefill_s = median(one.prefill_s for one in rounds)
    # One step decodes one token of every sequence.
    step_s = median(one.decode_s for one in rounds) / (settings.new - 1)
    read = cost.decode_bytes(settings.batch, settings.prompt, settings.new)
    flops = cost.prefill_flops(settings.batch, settings.prompt)
    return {
        "prefill_tok_s": settings.batch * settings.prompt / prefill_s,
        "decode_tok_s": settings.batch / step_s,
        "prefill_ratio": _ratio(measured, name, lambda one: one.prefill_s),
        "decode_ratio": _ratio(measured, name, lambda one: one.decode_s),
        "decode_bandwidth_fraction": read / step_s / 1e9 / measured.read_gb_s,
        # ..._beside: of what the machine reached at the time of each round.
        "decode_bandwidth_beside": median(
            read * (settings.new - 1) / one.decode_s / 1e9 / one.read_gb_s for one in rounds
        ),
        "prefill_peak_fraction": flops / prefill_s / 1e9 / measured.gemm_gflops,
        "prefill_peak_beside": median(flops / one.prefill_s / 1e9 / one.gemm_gflops for one in rounds),
        "peak_rss_mb": measured.peak_rss_mb[name],
    }


def _sharded(measured: Measurements) -> dict[str, dict[str, float]]:
    """Name of another variant -> speed of a sharded model over it, in both phases."""
    theirs, ours = sharded(measured.settings.tp) or ("", "")
    others = [name for name in ("level2", theirs) if name and name in measured.settings.variants]
    if ours not in measured.settings.variants:
        return {}
    return {
        other: {
            "prefill": _ratio(measured, ours, lambda one: one.prefill_s, other),
            "decode": _ratio(measured, ours, lambda one: one.decode_s, other),
        }
        for other in others
    }


def _ratio(
    measured: Measurements, name: str, seconds: Callable[[Round], float], other: str = BASELINE
) -> float:
    """Speed over the other's, as the median of the rounds that were run side by side.

    Variants of different groups never were: each is held against the baseline of its own group.
    """
    others = {one.index: seconds(one) for one in measured.rounds if one.variant == other}
    ratios = [
        others[one.index] / seconds(one)
        for one in measured.rounds
        if one.variant == name and one.index in others
    ]
    if ratios:
        return median(ratios)
    return _ratio(measured, name, seconds) / _ratio(measured, other, seconds)


def _isa(measured: Measurements) -> str:
    """Of our kernels where a level was run, else what torch reports."""
    levels = [name for name in measured.settings.variants if not name.startswith("hf-")]
    return measured.facts[levels[-1] if levels else BASELINE]["isa"]


def _notes(measured: Measurements) -> list[str]:
    notes = [
        f"{name}: no rule of ours served a call; see the status of this model."
        for name, status in measured.statuses.items()
        if name != "level0" and not any(rule["calls"] for rule in status["rules"])
    ]
    for name in (*measured.settings.variants, *measured.peers):
        counted = measured.facts.get(name, {}).get("token_bytes")
        if counted:
            parts = ", ".join(f"{part} {nbytes / 1e6:.1f}" for part, nbytes in counted.items())
            notes.append(f"{name} reads {sum(counted.values()) / 1e6:.1f} MB of weights a token: {parts}.")
    for other, ratio in _sharded(measured).items():
        notes.append(
            f"{sharded(measured.settings.tp)[1]}, {measured.settings.tp} processes that share the threads: "
            f"{ratio['decode']:.2f} times {other} in decode, {ratio['prefill']:.2f} in prefill."
        )
    if len(measured.groups) > 1:
        notes.append(
            f"Memory did not hold all variants at once: {len(measured.groups)} groups, {BASELINE} in each."
        )
    return notes


def _failures(variants: dict[str, dict[str, float]]) -> list[str]:
    limits = {
        "decode_bandwidth_fraction": "read bandwidth",
        "prefill_peak_fraction": "GEMM peak",
    }
    return [
        f"{name}: {field} is {figures[field]:.2f}, more than {MOST_FRACTION} of the measured {limit}. No "
        "program is faster than its machine: either the limit was measured while the machine was busy (run "
        "again with nothing else running), or the weights stay in a cache (choose a larger --arch)."
        for name, figures in variants.items()
        for field, limit in limits.items()
        # The peak is of products in the dtype; those of integers are faster.
        if not (figures[field] <= MOST_FRACTION or (name in ROUNDING and limit == "GEMM peak"))
    ]


def cpu_name() -> str:
    """The processor as the kernel names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def plot(summary: dict[str, Any], path: Path) -> None:
    """Draw tokens per second of both phases as bars, with ratio to the baseline and share of the limit.

    Args:
        summary: From `summarise`.
        path: A ``.png``, ``.svg`` or ``.pdf`` file.
    """
    # The object interface: pyplot would look for a display.
    from matplotlib.figure import Figure

    peers = summary.get("peers", {})
    variants, machine, settings = {**summary["variants"], **peers}, summary["machine"], summary["settings"]

    def color(name: str) -> str:
        return "C1" if name in peers else "C7" if "hf" in name else "C0"

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots(1, 2)
    phases = (
        ("prefill", "prefill_peak_fraction", "GEMM peak"),
        ("decode", "decode_bandwidth_fraction", "read bandwidth"),
    )
    for axis, (phase, fraction, limit) in zip(axes, phases, strict=True):
        speeds = [figures[f"{phase}_tok_s"] for figures in variants.values()]
        bars = axis.bar(list(variants), speeds, color=list(map(color, variants)))
        labels = [
            f"{figures[f'{phase}_ratio']:.2f}x\n{figures[fraction]:.0%}" for figures in variants.values()
        ]
        axis.bar_label(bars, labels, fontsize=8)
        axis.set_title(f"{phase} (times {BASELINE}, share of {limit})", fontsize=10)
        axis.set_ylabel("tokens/s")
        axis.margins(y=0.25)
    figure.suptitle(
        f"{settings['arch']}, {settings['dtype']}, prompt {settings['prompt']}, batch {settings['batch']}; "
        f"{machine['cpu']}, {machine['threads']} threads, {machine['isa']}",
        fontsize=9,
    )
    figure.savefig(path, dpi=150)
