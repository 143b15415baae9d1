"""Writes the README's figures from what the benchmark measured: a picture of the decode speeds, and a table.

python -m liteboost_adaptor bench --new 64 --variants level2,w8a16,w4a16 --json docs/readme_bench.json
python build_support/readme_figures.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from string import Template
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "docs" / "readme_bench.json"
PICTURE = ROOT / "docs" / "decode_speed.svg"
README = ROOT / "README.md"
#: What was measured, as a reader would say it: the benchmark has no more than the kernel's name for it.
MACHINE = "2 Zen 5 cores with AVX-512 BF16"
SECTION = """
![Tokens per second: transformers alone, with this package, with quantized weights](docs/$picture)

$table
$arch in $dtype on a CPU ($machine): one sequence, a prompt of $prompt tokens, $new new ones. Medians
of $repeats rounds that the variants take in turn, each in a process of its own, once their results agree:
`python -m liteboost_adaptor bench`. Quantized weights change results ([Quantization](docs/quantization.md)).

"""
#: The figures stand between these lines of the README.
BEGIN, END = "<!-- bench -->\n", "<!-- /bench -->\n"
#: Variant of the benchmark -> what a user does to get it.
VARIANTS = {
    "hf-sdpa": "transformers alone",
    "level2": "with `import liteboost_adaptor`",
    "w8a16": "and `LITEBOOST_QUANT=w8a16`",
    "w4a16": "or `LITEBOOST_QUANT=w4a16`",
}


def section() -> str:
    """What the README shows: nothing before anything was measured."""
    if not MEASURED.exists():
        return ""
    summary = json.loads(MEASURED.read_text(encoding="utf-8"))
    words = {name: str(value) for name, value in summary["settings"].items()}
    return Template(SECTION).substitute(words, picture=PICTURE.name, table=table(summary), machine=MACHINE)


def table(summary: dict[str, Any]) -> str:
    """The figures as a table in Markdown.

    Args:
        summary: What ``bench --json`` wrote.
    """
    lines = [
        "| | decode, tokens/s | times as fast | prefill, tokens/s | times as fast |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, label in VARIANTS.items():
        found = summary["variants"][name]
        decode = f"{found['decode_tok_s']:.1f} | {found['decode_ratio']:.1f}"
        prefill = f"{found['prefill_tok_s']:.0f} | {found['prefill_ratio']:.1f}"
        lines.append(f"| {label} | {decode} | {prefill} |")
    return "\n".join(lines) + "\n"


def draw(summary: dict[str, Any], path: Path) -> None:
    """Draw the decode speeds as bars, the same bytes for the same figures."""
    import matplotlib
    from matplotlib.figure import Figure  # the object interface: pyplot would look for a display

    labels = [label.replace("`", "") for label in VARIANTS.values()]
    speeds = [summary["variants"][name]["decode_tok_s"] for name in VARIANTS]
    ratios = [summary["variants"][name]["decode_ratio"] for name in VARIANTS]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "liteboost", "font.size": 11}):
        figure = Figure(figsize=(8, 2.3), layout="constrained")
        axis = figure.subplots()
        bars = axis.barh(labels, speeds, color=["#9aa0a6", *["#3367d6"] * (len(labels) - 1)], height=0.62)
        written = [f"{speed:.1f}   {ratio:.1f}x" for speed, ratio in zip(speeds, ratios, strict=True)]
        axis.bar_label(bars, written, padding=5)
        axis.invert_yaxis()
        axis.margins(x=0.22)
        axis.set_xlabel("tokens per second, decode")
        axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    text = README.read_text(encoding="utf-8")
    between = re.compile(f"(?<={re.escape(BEGIN)}).*?(?={re.escape(END)})", re.DOTALL)
    README.write_text(between.sub(lambda _: section(), text), encoding="utf-8")
    draw(json.loads(MEASURED.read_text(encoding="utf-8")), PICTURE)


if __name__ == "__main__":
    main()
