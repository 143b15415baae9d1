"""The status in short: a line for each model, what is not served and why, totals. As text and as HTML."""

from __future__ import annotations

import html
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Columns of the text.
WIDTH = 100
_LABEL = 28
#: Characters of a reason, and how many reasons of a kind; status(full=True) has all.
_REASON, _REASONS = 160, 4


@dataclass(frozen=True)
class ModelSummary:
    """One bound model.

    Attributes:
        name: Its class.
        modules: How many of its modules are served.
        served: Targets that are served, by rule.
        refused: Targets that are not, by rule and reason.
        reason: Why nothing is served at all, or an empty string.
    """

    name: str
    modules: int
    served: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[tuple[str, str], int] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True)
class Line:
    """What is said of ``label``; ``style`` is ``"good"``, ``"bad"``, ``"dim"`` or empty."""

    label: str
    text: str
    style: str = ""


def lines(status: Mapping[str, Any], models: Sequence[ModelSummary], missing: str = "") -> list[Line]:
    """What a user looks at.

    Args:
        status: ``Status.to_dict()``.
        models: The bound models that are alive.
        missing: Why there are no kernels and what to run, or an empty string.

    Returns:
        The headline, which has no label, and the lines below it.
    """
    rules = status["rules"]
    told = {key for model in models for key in model.refused}
    found = [Line("", headline(status))]
    if missing:
        found.append(Line("kernels", missing, "bad"))
    found += [Line("note", note, "bad") for note in status["environment"]]
    found += _of_npu(status["native"].get("npu", {}).get("lines", []))
    for model in models:
        found += _of_model(model)
    found += _other_rules(rules, {rule for model in models for rule in model.served}, told)
    found.append(Line("calls", _calls(rules, status["caches_bytes"])))
    found += _turned_off(rules)
    return found


def headline(status: Mapping[str, Any]) -> str:
    """Version, level and kernels."""
    native = status["native"]
    kernels = "none" if native["backend"] == "reference" else native["backend"]
    isa = f" ({native['isa']})" if native.get("isa") else ""
    return f"liteboost_adaptor {status['version']}, level {status['level']}, kernels: {kernels}{isa}"


def text(found: Sequence[Line]) -> str:
    """`Line`s in columns."""
    return "\n".join(row for row, _ in rows(found))


def rows(found: Sequence[Line], width: int = WIDTH) -> Iterator[tuple[str, str]]:
    """Rows of text, of at most ``width`` columns, and the style of each: `Line`s in columns."""
    label = min(max((len(line.label) for line in found), default=0), _LABEL)
    for line in found:
        first = f"  {line.label:<{label}}  " if line.label else ""
        indent = " " * (label + 4) if line.label else ""
        for row in textwrap.wrap(
            line.text, width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False
        ):
            yield row, line.style


def to_html(found: Sequence[Line]) -> str:
    """`Line`s as a table, for a notebook."""
    colors = {"good": "#1a7f37", "bad": "#9a6700", "dim": "#6e7781"}
    cell = "text-align:left;vertical-align:top"
    rows = []
    for line in found:
        color = f";color:{colors[line.style]}" if line.style else ""
        said = html.escape(line.text)
        if line.label:
            label = html.escape(line.label)
            rows.append(f'<tr><td style="{cell}">{label}</td><td style="{cell}{color}">{said}</td></tr>')
        else:
            rows.append(f'<tr><th colspan="2" style="{cell}">{said}</th></tr>')
    return f"<table>{''.join(rows)}</table>"


def _of_npu(sentences: Sequence[str]) -> Iterator[Line]:
    indented = [sentence.strip() for sentence in sentences if sentence.startswith(" ")]
    yield from (Line("NPU", each.removeprefix("NPU: ")) for each in sentences if not each.startswith(" "))
    yield from _some(indented, "", "bad")


def _of_model(model: ModelSummary) -> Iterator[Line]:
    if model.reason:
        yield Line(model.name, f"original code: {model.reason}", "bad")
        return
    families = ", ".join(sorted({rule.partition(".")[0] for rule in model.served}))
    yield Line(
        model.name, f"{_count(model.modules, 'module')} served{': ' * bool(families)}{families}", "good"
    )
    reasons = [_refusal(rule, reason, count) for (rule, reason), count in model.refused.items()]
    yield from _some(reasons, "  not served", "bad")


def _refusal(rule: str, reason: str, targets: int) -> str:
    return f"{rule} on {_count(targets, 'target')}: {reason}"


def _other_rules(
    rules: Sequence[Mapping[str, Any]], served: set[str], told: set[tuple[str, str]]
) -> Iterator[Line]:
    """Of what is no part of a model that is alive: fixes, features, faults, and models that are gone."""
    also = Counter(
        {
            rule["id"]: rule["targets"]
            for rule in rules
            if rule["state"] in ("applied", "proved, not listed")
            and rule["targets"]
            and rule["id"] not in served
        }
    )
    if also:
        yield Line("also applied", ", ".join(f"{rule} {count}" for rule, count in also.items()), "good")
    for state in ("failed", "refused", "foreign"):
        reasons = [
            _refusal(rule["id"], rule["reason"], rule["targets"])
            for rule in rules
            if rule["state"] == state and (rule["id"], rule["reason"]) not in told
        ]
        yield from _some(reasons, state, "bad")


def _calls(rules: Sequence[Mapping[str, Any]], caches_bytes: int) -> str:
    served = sum(rule["calls"] for rule in rules)
    reasons: Counter[str] = Counter()
    for rule in rules:
        reasons.update(rule["fallbacks"])
    parts = [f"{served:,} served"]
    if reasons:
        named = [f"{count:,} x {why}" for why, count in reasons.most_common(_REASONS)]
        if len(reasons) == 1:
            named = list(reasons)
        elif rest := len(reasons) - len(named):
            named.append(f"and {_count(rest, 'more reason')}")
        parts.append(f"{sum(reasons.values()):,} ran the original: {', '.join(named)}")
    elif served:
        parts.append("none ran the original")
    if caches_bytes:
        parts.append(f"{caches_bytes / 2**20:.1f} MiB in caches of ours")
    return "; ".join(parts)


def _turned_off(rules: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    """What the user, the level or an older transformers turns off, by reason."""
    reasons = Counter(
        rule["reason"] for rule in rules if rule["state"] == "disabled" and rule["reason"]
    ).most_common()
    sentences = [f"{_count(count, 'rule')}: {reason}" for reason, count in reasons]
    yield from _some(sentences, "disabled", "dim")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _some(sentences: Sequence[str], label: str, style: str) -> Iterator[Line]:
    """A line for each, up to a number; ``label`` stands beside the first."""
    for number, sentence in enumerate(sentences[:_REASONS]):
        yield Line(
            label if number == 0 else " ", textwrap.shorten(sentence, _REASON, placeholder=" …"), style
        )
    if len(sentences) > _REASONS:
        yield Line(" ", f"and {len(sentences) - _REASONS} more", style)
