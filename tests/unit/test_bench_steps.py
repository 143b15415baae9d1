"""``bench.steps``: decode steps of one process in turn. No time is asserted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import tiny_models

import liteboost_adaptor
from liteboost_adaptor.bench import step_profile, steps
from liteboost_adaptor.bench.token_bytes import token_bytes


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    yield
    liteboost_adaptor.undo()


@pytest.mark.parametrize("quant", ["", "w8a16"])
def test_steps_of_a_saved_model(tmp_path: Path, capsys: pytest.CaptureFixture[str], quant: str) -> None:
    model = tiny_models.build("llama")
    model.save_pretrained(tmp_path)
    threads = torch.get_num_threads()
    options = ["--dtype", "float32", "--prompt", "8", "--batch", "2", "--context", "40", "--rounds", "3"]
    try:
        steps.main(["--arch", str(tmp_path), "--threads", "1", "--quant", quant, *options])
    finally:
        torch.set_num_threads(threads)
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows[2:]] == ["batch 1, context 8", "batch 2, context 8", "batch 1, context 40"]
    text, head = model.config, model.get_output_embeddings().weight
    if quant:
        liteboost_adaptor.apply(model, quant=quant)
        counted = sum(token_bytes(model).values())
    weights = (
        counted
        if quant
        else sum(p.nbytes for p in model.parameters())
        - (0 if text.tie_word_embeddings else model.get_input_embeddings().weight.nbytes)
    )
    row = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * head.element_size()
    # The steps timed are those after the warm-up; the one in the middle is the average.
    first, longer = (weights + row * (context + steps.WARM_UP + 2) for context in (8, 40))
    assert [row[1] for row in rows[2:]] != ["0.000"] * 3
    assert float(rows[2][2]) == float(rows[2][3]) == float(rows[2][4]) == 1
    assert float(rows[4][3]) == pytest.approx(longer / first, abs=1e-3)


def _profiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str, family: str = "llama"
) -> list[list[str]]:
    tiny_models.build(family).save_pretrained(tmp_path / "model")
    threads = torch.get_num_threads()
    common = ["--dtype", "float32", "--prompt", "8", "--rounds", "3", "--threads", "1", "--profile"]
    try:
        steps.main(["--arch", str(tmp_path / "model"), *common, *options])
    finally:
        torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in lines if row.startswith("|")][2:]


def test_the_rows_of_a_profile_add_up_to_the_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *rows, whole = _profiled(tmp_path, capsys)
    assert whole[0] == "sum" and {step_profile.NOTES, step_profile.AROUND} <= {row[0] for row in rows}
    for column, tolerance in ((1, 0), (2, 1e-3 * len(rows)), (4, 0.1 * len(rows))):
        assert float(whole[column]) == pytest.approx(sum(float(row[column]) for row in rows), abs=tolerance)


def test_a_trace_has_every_operator_with_its_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "step.json"
    rows = _profiled(tmp_path, capsys, "--trace", str(file))
    events = json.loads(file.read_text())
    assert sum(int(row[1]) for row in rows[:-1]) == len(events)
    config = tiny_models.build("llama").config
    heads = [
        each
        for each in events
        if each["args"]["operand"].endswith(f"[{config.vocab_size}, {config.hidden_size}]")
    ]
    assert [each["name"] for each in heads] == ["liteboost::linear"]
    # The weight, what it is multiplied by, and the logits.
    size = config.vocab_size * config.hidden_size + config.hidden_size + config.vocab_size
    assert heads[0]["args"]["bytes"] == 4 * size
    begins = [each["ts"] for each in events]
    assert begins[0] == 0 and begins == sorted(begins)
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == [file.name]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--trace", "step.json"], "--trace writes what --profile measures; give both"),
        (["--profile", "--trace", "nowhere/step.json"], "Make it first."),
        (["--profile", "--trace", "."], "it cannot be written in"),
        (["--profile", "--rounds", "0"], "--rounds has to be at least 1; found 0"),
    ],
)
def test_a_trace_that_cannot_be_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    with pytest.raises(SystemExit):
        steps.main(options)
    assert words in capsys.readouterr().err


def test_a_profile_of_a_step_that_no_program_serves_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "WARM_UP", 0)
    with pytest.raises(SystemExit):
        _profiled(tmp_path, capsys)
    said = capsys.readouterr().err
    assert "no program served this one: " in said and "Choose another --arch" in said
    assert "none of its calls" not in said  # the status has a reason


@pytest.mark.parametrize("family", ["bloom", "falcon"])
def test_a_profile_counts_no_bytes_of_views(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    rows = _profiled(tmp_path, capsys, "--trace", str(tmp_path / "step.json"), family=family)
    views = ("view", "permute", "transpose", "expand", "unsqueeze", "slice")
    events = json.loads((tmp_path / "step.json").read_text())
    moved = {(each["name"].removeprefix("aten::"), each["args"]["bytes"]) for each in events}
    assert {name for name, _ in moved}.intersection(views)
    assert not [name for name, count in moved if name in views and count]
    assert not [row[0] for row in rows if row[0].removeprefix("aten::").split("(")[0] in views]
    # Keys and values that are added are read and written.
    added = [count for name, count in moved if name in ("append", "both")]
    assert added and all(added)


def test_a_model_of_experts_is_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = _profiled(tmp_path, capsys, family="mixtral")
    assert [row for row in rows if row[0].startswith("experts_")]


def _event(name: str, run: int, begin: int, end: int, moved: int = 8) -> step_profile.Event:
    return step_profile.Event(name, "", run, begin, end, moved)


def test_programs_that_stop_have_a_row_and_what_is_between_two_runs_is_around_them() -> None:
    events = [
        _event("aten::relu", -1, 0, 10),
        _event("aten::relu", 2, 100, 130),
        _event("add", 2, 135, 136, 0),
        _event("aten::relu", 3, 500, 520),
    ]
    rows = {row.name: (row.calls, round(row.seconds * 1e9)) for row in step_profile._rows(1e-6, events)}
    assert rows == {
        "aten::relu()": (2, 50),
        step_profile.STOPPED: (1, 10),
        step_profile.SMALL: (1, 1),
        step_profile.NOTES: (0, 5),
        step_profile.AROUND: (0, 1000 - 10 - 36 - 20),
    }
