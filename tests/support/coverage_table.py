"""docs/coverage.md: made by ``make coverage``, one line a family, and read back by the test that checks it.

``python -m support.coverage_table [FILE.json]`` (in ``tests/``) measures every family and writes the page;
with a file, also everything that was measured.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from liteboost_adaptor.huggingface.runtime import load_catalogue

from .coverage import KINDS, Coverage

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coverage.md"
_HEAD = ("family", *KINDS, "share", "rules", "still the original's")

#: Rules of the catalogue that no family here needs, and why they are there.
KEPT_RULES = {
    "experts.batched_mm": "anyone may ask for this implementation; no family does so by default",
    "mlp.quick_gelu": "any configuration may name this activation; no family does so by default",
    "mlp.quick_gelu_module": "as mlp.quick_gelu, outside of a product: CLIP",
    "attention.eager_biased": "encoder-decoder models: LongT5, Switch",
    "norm.gate_switched": "Falcon-H1 configured with mamba_rms_norm, which is off by default",
    "norm.rms_t5": "encoders and image-text models: T5, Idefics, Kosmos-2.5, Pix2Struct",
    "norm.layer_channels": "vision towers: ConvNeXt, SAM, GOT-OCR2",
    "rope.half_partial_ids": "audio encoders: GLM-ASR, Nemotron",
    "rope.half_vision": "vision towers: Qwen-VL, GLM-4V, ERNIE 4.5 VL and twenty more",
    "rope.half_vision_partial": "vision tower: MiniMax-M3",
    "rope.interleaved_vision": "vision tower: Inkling 2",
    "paged.sdpa": "continuous batching: generate_batch of any family",
    "paged.eager": "as paged.sdpa, of families that have no sdpa",
    "paged.requests": "as paged.sdpa",
    "paged.manager": "as paged.sdpa",
    "rope.interleaved_table": "token classification: OpenAI's privacy filter",
    "step.program": "coverage is counted by a dispatch mode, under which no step is recorded",
}


@dataclasses.dataclass(frozen=True)
class Line:
    """One family: kind -> (calls on our ops, calls the unpatched model makes), and what (not) serves them."""

    family: str
    calls: dict[str, tuple[int, int]]
    rules: tuple[str, ...]
    left: str

    @property
    def share(self) -> float:
        """Calls on our ops over all calls."""
        served, total = (sum(column) for column in zip(*self.calls.values(), strict=True))
        return served / total if total else 0.0

    def is_whole(self, *kinds: str) -> bool:
        """Whether every call of these kinds runs on our ops."""
        return all(self.calls[kind][0] == self.calls[kind][1] for kind in kinds)

    def has(self, *kinds: str) -> bool:
        """Whether the unpatched model makes a call of one of these kinds."""
        return any(self.calls[kind][1] for kind in kinds)

    def __str__(self) -> str:
        cells = [f"{served}/{total}" if total else "" for served, total in self.calls.values()]
        share = f"{100 * self.share:.0f} %"
        return f"| {' | '.join([self.family, *cells, share, ' '.join(self.rules), self.left])} |"

    @classmethod
    def parse(cls, text: str) -> Line:
        family, *cells = [cell.strip() for cell in text.strip().strip("|").split("|")]
        counts = [tuple(map(int, cell.split("/"))) if cell else (0, 0) for cell in cells[: len(KINDS)]]
        _, rules, left = cells[len(KINDS) :]
        return cls(family, dict(zip(KINDS, counts, strict=True)), tuple(rules.split()), left)


def line(coverage: Coverage) -> Line:
    """The line of a measured family."""
    return Line(coverage.family, coverage.calls, coverage.rules, "; ".join(_left(coverage)))


def _left(coverage: Coverage) -> Iterator[str]:
    """What still runs the original, each with the reason: refused, fallen back, or known to no rule."""
    refused = {target.split(": ")[-1].split(".")[-1]: why for target, why in map(_cut, coverage.refusals)}
    for kind, names in coverage.unserved.items():
        for name in sorted(names):
            why = refused.pop(name.split(".")[-1], "")
            yield f"{kind} {name}" + (f" ({why})" if why else "")
    for name, why in sorted(refused.items()):
        yield f"{name} refused ({why})"
    for what, count in coverage.fallbacks.items():
        yield f"{count} x {what}"


def _cut(refusal: str) -> tuple[str, str]:
    """Target and the first clause of the reason, without the figures of a probe."""
    found = re.match(r"(.*?): (body \w+ is not in the catalogue|.*)", refusal)
    target, why = (found[1], found[2]) if found else ("", refusal)
    if ": " in why and not why.startswith("body"):
        name, why = why.split(": ", 1)
        target = f"{target}: {name}"
    return target, why.split(";")[0].replace("body ", "").replace(" is not in the catalogue", " unknown")


def totals(lines: Iterable[Line]) -> str:
    """The table at the top: families that have a kind, how many are served wholly, and calls."""
    lines = list(lines)
    rows = [
        "| | families that have it | served wholly | | calls | on our ops | |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for title, kinds in [*((kind, (kind,)) for kind in KINDS), ("gated or experts", ("gated", "experts"))]:
        having = [one for one in lines if one.has(*kinds)]
        whole = sum(one.is_whole(*kinds) for one in having)
        served = sum(one.calls[kind][0] for one in having for kind in kinds)
        total = sum(one.calls[kind][1] for one in having for kind in kinds)
        rows.append(_total(title, len(having), whole, total, served))
    served = sum(one.calls[kind][0] for one in lines for kind in KINDS)
    total = sum(one.calls[kind][1] for one in lines for kind in KINDS)
    rows.append(_total("all", len(lines), sum(one.is_whole(*KINDS) for one in lines), total, served))
    return "\n".join(rows)


def _total(title: str, having: int, whole: int, total: int, served: int) -> str:
    shares = [
        f"{100 * part / all_:.1f} %" if all_ else "" for part, all_ in ((whole, having), (served, total))
    ]
    return f"| {title} | {having} | {whole} | {shares[0]} | {total} | {served} | {shares[1]} |"


def idle_rules(lines: Iterable[Line]) -> list[str]:
    """Rules of the catalogue that served no call of any family."""
    used = {rule for one in lines for rule in one.rules}
    return [rule.id for rule in load_catalogue(())[0] if rule.id not in used]


def page(sections: dict[str, list[Line]]) -> str:
    """The whole document; ``sections`` maps a section of `SECTIONS` to its lines."""
    import transformers

    text = [_INTRODUCTION.format(version=transformers.__version__)]
    for section, lines in sections.items():
        text += [f"## {section}: {len(lines)} families", totals(lines), _table(lines)]
    return "\n\n".join(text) + "\n"


def _table(lines: list[Line]) -> str:
    head = [f"| {' | '.join(_HEAD)} |", "|---|" + "--:|" * (len(KINDS) + 1) + "---|---|"]
    return "\n".join([*head, *map(str, lines)])


def version() -> str:
    """The transformers release the page was made with."""
    return re.search(r"with transformers\s([\w.]+),", PAGE.read_text(encoding="utf-8"))[1]


def read() -> dict[str, tuple[str, list[Line]]]:
    """The page as it is: section -> (table of totals, lines)."""
    found = {}
    for part in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        title, first, second = part.strip().split("\n\n")
        found[title.split(":")[0]] = (first, [Line.parse(row) for row in second.splitlines()[2:]])
    return found


_INTRODUCTION = """# Coverage

Made by `make coverage` and checked by `tests/models`; not edited by hand. Measured with transformers
{version}, a tiny model of each family that can be built, fp32, level 2: prefill of a left-padded batch, two
cached steps.

Each cell is *calls on our ops / calls of the unpatched model*. What counts is found by running the unpatched
model, without our catalogue:

- *norm*: modules that normalise;
- *rope*: outermost calls of functions that rotate queries or keys;
- *attention*: the functions that transformers' attention registry hands out;
- *gated*: products of an activation with another tensor, in an MLP or an expert;
- *experts*: the functions of the experts registry, or matrix products in experts that do not ask it;
- *linear*: `nn.Linear`.

A call is on our ops when the original does not run in the served model. Only what a text prompt runs is
counted. The last column names what still runs the original and why: refused, fallen back at the call, or
(without a word) known to no rule."""


def main(arguments: list[str]) -> None:
    from . import families, state

    state.pristine()
    measured = {title: list(families.measured(title)) for title in families.SECTIONS}
    if arguments:
        raw = {c.family: dataclasses.asdict(c) for all_ in measured.values() for c in all_}
        Path(arguments[0]).write_text(json.dumps(raw, indent=1), encoding="utf-8")
    lines = {title: [line(one) for one in all_] for title, all_ in measured.items()}
    PAGE.write_text(page(lines), encoding="utf-8")
    for title, some in lines.items():
        sys.stdout.write(f"{title}\n{totals(some)}\n\n")
    for rule in idle_rules(one for some in lines.values() for one in some):
        sys.stdout.write(f"rule {rule} serves nothing\n")


if __name__ == "__main__":
    main(sys.argv[1:])
