"""``bench.speculation``: texts with and without candidates in turn. No time is asserted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import tiny_models

import liteboost_adaptor
from liteboost_adaptor.bench import speculation
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


@pytest.mark.parametrize("kept", [False, True], ids=["weights thrown away", "weights kept"])
def test_the_command_hands_its_options_on(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def prepared(arch: str, dtype: str, workdir: Path) -> SimpleNamespace:
        assert (arch, dtype) == ("tiny", "float32") and workdir.is_dir()
        assert (workdir == tmp_path) is kept
        return SimpleNamespace(folder=workdir / "model")

    def measured(folder: Path, *options: Any) -> list[Speculated]:
        asked.extend([folder.name, *options, torch.get_num_threads()])
        return [Speculated("greedy", 30.0, 90.0, 3.0, (2.0, 4.0), 20, 20)]

    monkeypatch.setattr(speculation, "prepare", prepared)
    monkeypatch.setattr(speculation, "measure", measured)
    options = ["--arch", "tiny", "--dtype", "float32", "--speculate", "lookup:3", "--quant", "w8a8"]
    numbers = ["--prompt", "9", "--new", "10", "--rounds", "2", "--threads", "2", "--tasks", "greedy"]
    threads = torch.get_num_threads()
    try:
        speculation.main([*options, *numbers, *(["--workdir", str(tmp_path)] if kept else [])])
    finally:
        torch.set_num_threads(threads)
        liteboost_adaptor.undo()
    assert asked == ["model", "float32", "lookup:3", 2, 9, 10, "w8a8", ["greedy"], 2]
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| greedy | 30.0 | 90.0 | 3.00 | 2.00, 4.00 | 20 of 20 |"
    ]
