"""``bench.speculation``: texts with and without candidates in turn. No time is asserted."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import tiny_models

from liteboost_adaptor.bench.speculation import TASKS, Speculated, measure, table


@pytest.mark.parametrize("quant", ["", "w8a8"])
def test_both_generate_the_same_text(tmp_path: Path, quant: str) -> None:
    tiny_models.build("qwen3").save_pretrained(tmp_path)
    found = measure(tmp_path, "float32", "lookup", rounds=2, prompt=12, new=24, quant=quant)
    assert [each.task for each in found] == list(TASKS)
    greedy, samples = found
    assert (greedy.tokens, greedy.equal, samples.tokens) == (48, 48, 48)
    for each in found:
        least, largest = each.range
        assert 0 < least <= each.ratio <= largest and each.plain > 0 and each.speculated > 0


def test_the_table() -> None:
    rows = [
        Speculated("greedy", 30.0, 90.0, 3.0, (2.0, 4.0), 2000, 1500),
        Speculated("samples", 30.0, 29.4, 0.98, (0.97, 1.01), 2000, 3),
    ]
    assert "".join(table(rows)).splitlines()[2:] == [
        "| greedy | 30.0 | 90.0 | 3.00 | 2.00, 4.00 | 1,500 of 2,000 |",
        "| samples | 30.0 | 29.4 | 0.98 | 0.97, 1.01 | other samples |",
    ]
