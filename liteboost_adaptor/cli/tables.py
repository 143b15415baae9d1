"""Rich tables: the status of the rules, the figures of a benchmark, the findings of an audit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .. import summary

if TYPE_CHECKING:
    from ..report import Status

_STYLES = {
    "applied": "green",
    "proved, not listed": "green",
    "foreign": "yellow",
    "refused": "yellow",
    "failed": "bold red",
}
#: States of rules that are listed by id alone, and what to say of them where no reason is known.
_UNUSED = {
    "idle": "idle, no use for them in the models so far",
    "disabled": "disabled",
}
_LINE_STYLES = {"good": "green", "bad": "yellow", "dim": "dim"}
#: Targets that are named; further ones are counted.
_NAMED_TARGETS = 3


def status_summary(status: Status, width: int) -> RenderableType:
    """What `liteboost_adaptor.status` says in short, in at most ``width`` columns."""
    return Group(
        *(Text(row, _LINE_STYLES.get(style, "")) for row, style in summary.rows(status.lines(), width))
    )


def status_table(status: Mapping[str, Any]) -> RenderableType:
    """What `liteboost_adaptor.status` says.

    Args:
        status: ``Status.to_dict()``.

    Returns:
        A line on the package, a table with a row for each rule and state, and lines on the rules that are
        idle or disabled, on models, and on caches.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("rule", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("targets", justify="right")
    table.add_column("where", overflow="fold")
    table.add_column("backend")
    table.add_column("calls", justify="right")
    table.add_column("fallbacks", overflow="fold")
    table.add_column("reason", overflow="fold")
    for rule in status["rules"]:
        if not _is_unused(rule):
            table.add_row(*_status_row(rule))
    return Group(_headline(status), *map(Text, status["environment"]), table, *_footer(status))


def _headline(status: Mapping[str, Any]) -> Text:
    native = status["native"]
    kernels = native["backend"]
    if native.get("isa"):
        kernels += f" ({native['isa']})"
    line = Text.assemble(
        ("liteboost_adaptor", "bold"),
        f" {status['version']} level {status['level']}, kernels: {kernels}",
    )
    if native.get("reason"):
        line.append(f"\n{native['reason']}", "yellow")
    for number, sentence in enumerate(native.get("npu", {}).get("lines", ())):
        line.append(f"\n{sentence}", "yellow" if number else "")
    return line


def _is_unused(rule: Mapping[str, Any]) -> bool:
    """Whether there is nothing to say of a rule but its state."""
    return not rule["targets"] and (
        rule["state"] == "disabled" or (rule["state"] == "idle" and not rule["reason"])
    )


def _status_row(rule: Mapping[str, Any]) -> list[Text]:
    named = [_short(place) for place in rule["where"][:_NAMED_TARGETS]]
    if len(rule["where"]) > _NAMED_TARGETS:
        named.append(f"and {len(rule['where']) - _NAMED_TARGETS} more")
    fallbacks = [f"{count} x {why}" for why, count in rule["fallbacks"].items()]
    reason = Text(rule["reason"])
    calls = Text(str(rule["calls"]))
    is_bound = rule["state"] in ("applied", "proved, not listed")
    if is_bound and not rule["calls"] and not rule["fallbacks"]:
        calls.stylize("yellow")
        reason.append("; " if reason else "").append("installed, but not reached so far", "yellow")
    return [
        Text(rule["id"]),
        Text(rule["state"], _STYLES.get(rule["state"], "")),
        Text(str(rule["targets"])),
        Text("\n".join(named)),
        Text(rule["backend"]),
        calls,
        Text("\n".join(fallbacks)),
        reason,
    ]


def _short(place: str) -> str:
    """A target without its module, whose dotted path repeats the name of the model three times."""
    return place.rpartition(".")[2].partition(":")[2] or place


def _footer(status: Mapping[str, Any]) -> list[Text]:
    unused: dict[str, list[str]] = {}
    for rule in status["rules"]:
        if _is_unused(rule):
            unused.setdefault(rule["reason"] or _UNUSED[rule["state"]], []).append(rule["id"])
    lines = [f"{meaning}: {', '.join(rules)}" for meaning, rules in unused.items()]
    lines += [f"{model['class']}: {model['modules']} modules served" for model in status["models"]]
    return [*map(Text, lines), Text(f"caches of ours: {status['caches_bytes'] / 2**20:.1f} MiB")]


def audit_table(versions: Sequence[Mapping[str, Any]]) -> RenderableType:
    """What an audit found.

    Args:
        versions: ``Drift.to_dict()`` of each version.

    Returns:
        A table with a row for each version, one with a row for each difference, and modules not looked at.
    """
    summary = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("transformers", "listed", "proved", "known, not served", "new", "changed", "gone"):
        summary.add_column(heading, justify="left" if heading == "transformers" else "right")
    details = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("transformers", "kind", "body", "rule", "targets", "reason"):
        details.add_column(heading, overflow="fold", no_wrap=heading in ("kind", "body"))
    notes = []
    for version in versions:
        kinds = Counter({"new": 0, "changed": 0, "gone": 0})
        for difference in version["differences"]:
            kinds[difference["kind"]] += len(difference["targets"])
            details.add_row(*_difference_row(version["version"], difference))
        states = version["states"]
        summary.add_row(
            version["version"],
            *(str(states[state]) for state in ("listed", "proved", "known")),
            *(Text(str(n), "yellow" if n else "") for n in kinds.values()),
        )
        for module, why in version["not_imported"].items():
            notes.append(Text(f"not looked at in {version['version']}: {module} ({why})"))
    return Group(summary, *([details] if details.row_count else []), *notes)


def _difference_row(version: str, difference: Mapping[str, Any]) -> list[Text]:
    # The last part of the module says which family's; most functions have one name.
    named = [name.partition(":") for name in difference["targets"][:_NAMED_TARGETS]]
    names = [f"{module.rpartition('.')[2]}:{rest}" for module, _, rest in named]
    if len(difference["targets"]) > _NAMED_TARGETS:
        names.append(f"and {len(difference['targets']) - _NAMED_TARGETS} more")
    proof = "proved by a probe" if difference["proved"] else difference["reason"]
    return [
        Text(version),
        Text(difference["kind"], "yellow"),
        Text(difference["digest"]),
        Text(difference["rule"]),
        Text("\n".join(names)),
        Text(proof, "green" if difference["proved"] else ""),
    ]


def selftest_table(facts: Mapping[str, str], rows: Sequence[Sequence[str]]) -> RenderableType:
    """What a selftest found.

    Args:
        facts: Of the device and the versions.
        rows: ``selftest.report.row`` of every result.

    Returns:
        A line for each fact, and a table with a row for each op and kind.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("op", "kind"):
        table.add_column(name, no_wrap=True)
    for name in ("served", "error", "allowed", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    table.add_column("remark", overflow="fold")
    for *cells, outcome, remark in rows:
        style = {"pass": "green", "FAIL": "bold red"}.get(outcome, "yellow")
        table.add_row(*map(Text, cells), Text(outcome, style), Text(remark))
    return Group(*(Text(f"{name}: {value}") for name, value in facts.items()), table)


def modelled_table(found: Sequence[Any], card: str) -> RenderableType:
    """Modelled decode steps.

    Args:
        found: `liteboost_adaptor.bench.modelled.Modelled` of every variant.
        card: They are modelled for.
    """
    table = Table(
        title=f"modelled decode step on {card}: launches of a simulated run, no card was asked",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("variant")
    headings = ("launches", "MB moved", "of what must", "host ms", "device ms", "tok/s", "one graph tok/s")
    for heading in headings:
        table.add_column(heading, justify="right")
    for each in found:
        table.add_row(
            each.variant,
            str(each.launches),
            f"{each.bytes / 1e6:.1f}",
            f"{each.bytes / each.must_move:.2f}",
            f"{each.time.host * 1e3:.2f}",
            f"{each.time.device * 1e3:.2f}",
            f"{1 / each.time.eager:.0f}",
            f"{1 / each.time.graph:.0f}",
        )
    return table


def bench_table(summary: Mapping[str, Any]) -> RenderableType:
    """The figures of a benchmark.

    Args:
        summary: From `liteboost_adaptor.bench.report.summarise`.
    """
    settings, machine = summary["settings"], summary["machine"]
    table = Table(
        title=f"{settings['arch']}, {settings['dtype']}, prompt {settings['prompt']}, new {settings['new']}, "
        f"batch {settings['batch']}, median of {settings['repeats']}",
        title_justify="left",
        caption=f"{machine['cpu']}, {machine['threads']} threads, {machine['isa']}; measured limits: read "
        f"{machine['read_gb_s']:.1f} GB/s, GEMM {machine['gemm_gflops']:.0f} GFLOP/s (then: of what "
        "was measured beside each round)",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for heading in (
        "variant",
        "prefill tok/s",
        "to hf-sdpa",
        "of GEMM peak",
        "then",
        "decode tok/s",
        "to hf-sdpa",
        "of read bandwidth",
        "then",
        "peak MiB",
        "tokens equal",
    ):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    for name, figures in {**summary["variants"], **summary.get("peers", {})}.items():
        agreement = summary["agreement"].get(name)
        table.add_row(
            name,
            f"{figures['prefill_tok_s']:.1f}",
            f"{figures['prefill_ratio']:.2f}",
            f"{figures['prefill_peak_fraction']:.0%}",
            f"{figures['prefill_peak_beside']:.0%}",
            f"{figures['decode_tok_s']:.2f}",
            f"{figures['decode_ratio']:.2f}",
            f"{figures['decode_bandwidth_fraction']:.0%}",
            f"{figures['decode_bandwidth_beside']:.0%}",
            f"{figures['peak_rss_mb']:.0f}",
            f"{agreement['equal_tokens']}/{agreement['tokens']}" if agreement else "",
        )
    return Group(table, *(Text(note, "yellow") for note in summary["notes"]))


def throughput_table(summary: Mapping[str, Any]) -> RenderableType:
    """The figures of requests that were answered all at once.

    Args:
        summary: From `liteboost_adaptor.bench.throughput.report.summarise`.
    """
    settings, machine = summary["settings"], summary["machine"]
    table = Table(
        title=f"{settings['arch']}, {settings['dtype']}, prompt {settings['prompt']}, new {settings['new']}, "
        f"median of {settings['repeats']}",
        title_justify="left",
        caption=f"{machine['cpu']}, {machine['threads']} threads, {machine['isa']}; measured limits: read "
        f"{machine['read_gb_s']:.1f} GB/s, GEMM {machine['gemm_gflops']:.0f} GFLOP/s. Of limit: the least "
        "time they allow, as measured beside each round, over the time taken",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for heading in ("requests", "", "tokens/s", "to hf-sdpa", "of limit", "of GEMM peak"):
        table.add_column(heading, justify="right" if heading else "left")
    for heading in ("first ms", "next p50", "next p99", "peak MiB"):
        table.add_column(heading, justify="right")
    for requests, row in summary["requests"].items():
        for name, figures in row.items():
            table.add_row(
                requests,
                name,
                f"{figures['tokens_s']:.1f}",
                f"{figures['times']:.2f}",
                *(_share(figures[key]) for key in ("limit_fraction", "peak_fraction")),
                *(_milliseconds(figures[key]) for key in ("first_p50_s", "next_p50_s", "next_p99_s")),
                f"{summary['peak_rss_mb'][name]:.0f}",
            )
        table.add_section()
    return table


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.0f}"


def sparse_table(settings: Any, share: str, gain: Any, losses: Sequence[Any]) -> RenderableType:
    """What block-sparse attention gains and loses.

    Args:
        settings: `liteboost_adaptor.bench.settings.Settings`.
        share: As LITEBOOST_SPARSE takes it.
        gain: `liteboost_adaptor.bench.sparse.Gain`.
        losses: `liteboost_adaptor.bench.sparse.Loss` of every length; none without a trained model.
    """
    table = Table(
        title=f"attention of a layer of {settings.arch}, {settings.dtype}, {settings.prompt} tokens, sparse "
        f"{share}, {settings.threads} threads, median of {settings.repeats}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    figures = {
        "dense ms": f"{gain.dense_ms:.0f}",
        "sparse ms": f"{gain.sparse_ms:.0f}",
        "times faster": f"{gain.ratio:.2f}",
        "of it choosing": f"{gain.selection:.1%}",
        "blocks read": f"{gain.density:.1%}",
        "error, random states": f"{gain.error:.2f}",
    }
    for heading in figures:
        table.add_column(heading, justify="right")
    table.add_row(*figures.values())
    lines = [
        f"trained model, {each.tokens} tokens in blocks of {each.block}: {each.dense:.4f} nats a token, "
        f"{each.sparse:.4f} sparse ({each.sparse - each.dense:+.4f}); error of logits {each.error:.1e}"
        for each in losses
    ]
    if not lines:
        lines = ["No --trained model, so no loss is known."]
    return Group(table, *(Text(line, "" if losses else "yellow") for line in lines))
