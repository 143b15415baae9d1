"""Keeps words out that the project once had for what the field calls otherwise: a part of `make lint`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("liteboost_adaptor", "kernels", "tests", "docs", "examples", "patches")
KINDS = {".py", ".md", ".cpp", ".h", ".toml", ".txt", ".cmake"}
#: What was said -> what to say.
WORDS = {
    r"[Qq]uantis(e|ation|ing|able)": "quantiz-, as torch spells it",
    r"[Mm]ultiplied out": "dequantized",
    r"\b(weights|layers) of integers": "quantized weights, quantized layers",
    r"\b[Mm]eets? integers\b": "uses integer dot products",
    r"\blay_back|\blay back\b": "unpack",
    r"\b(SumLinear|HeadLinear|DeferredLinear)\b": "RowParallelLinear, ColumnParallelHead, …",
    r"\bInt8Rows\b": "Int8KVTensor",
    r"\bbecome_part\b|\bbecomes? a part of its rank": "shard",
    r"\b[Bb]y one line\b": "with one line",
    r"\b(Tally|tally|fell_back)\b": "CallCounter, counter, count_fallback",
    r"\b(linear|experts)_tiles\b": "linear_packed, experts_packed",
    r"\b(scales_)?(to|from)_tiles\b": "prepack, unpack",
    r"\bint8_rows\b": "quantize_kv",
    r"\bhand(s|ed|ing)? back the call\b|\bhanded back (to|at)\b": "fall back to the original",
    r"\bpretend(s|ed|ing)?\b": "what is really done",
    r"\b[Dd]ivided (over|among) (processes|ranks)\b": "sharded",
}


def main() -> int:
    """Print each line that has one of the words. The status is 1 where there is any."""
    found = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")))
    files = [*sorted(ROOT.glob("*.md")), *(path for path in found if path.suffix in KINDS)]
    wrong = 0
    for path in files:
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
            for word, instead in WORDS.items():
                if said := re.search(word, line):
                    wrong += 1
                    place = f"{path.relative_to(ROOT)}:{number}"
                    sys.stdout.write(f"{place}: {said[0]!r}: say {instead}\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
