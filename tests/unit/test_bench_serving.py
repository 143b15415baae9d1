"""What clients see of a server: the arithmetic of the figures, and what is read of a stream."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from liteboost_adaptor.bench.serving import __main__ as command
from liteboost_adaptor.bench.serving import client, runner
from liteboost_adaptor.bench.serving.client import ServingError, read_stream
from liteboost_adaptor.bench.serving.figures import Answer, Figures, medians, percentile, summarise
from liteboost_adaptor.bench.serving.runner import Load, Row, compare, table

MODEL = Path(__file__).parents[2] / "examples" / "models" / "shakespeare-llama"
#: Two clients: one text of three parts, one of two.
ANSWERS = [
    Answer(asked=10.0, parts=(10.5, 10.6, 10.9), ended=11.0, tokens=4, text="a b c"),
    Answer(asked=10.2, parts=(11.2, 11.4), ended=12.0, tokens=2, text="d e"),
]


@pytest.mark.parametrize(
    ("values", "percent", "found"),
    [([3.0, 1.0, 2.0], 50, 2.0), ([3.0, 1.0, 2.0, 4.0], 50, 2.0), ([1.0], 99, 1.0), (range(200), 99, 197)],
)
def test_a_percentile_is_one_of_the_values(values: list[float], percent: float, found: float) -> None:
    assert percentile(values, percent) == found


def test_a_percentile_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="found none"):
        percentile([], 50)


def test_figures_of_a_round() -> None:
    found = summarise(ANSWERS)
    assert found.tokens_s == pytest.approx(6 / 2)  # from the first request to the end of the last answer
    assert (found.first_p50_s, found.first_p99_s) == pytest.approx((0.5, 1.0))
    assert (found.next_p50_s, found.next_p99_s) == pytest.approx((0.2, 0.3))


def test_each_figure_has_a_median_of_its_own() -> None:
    rounds = [Figures(1, 5, 1, 1, 1), Figures(2, 3, 1, 1, 9), Figures(3, 4, 1, 1, 5)]
    assert medians(rounds) == Figures(2, 4, 1, 1, 5)


def test_another_text_is_an_error() -> None:
    compare(ANSWERS, ANSWERS)
    with pytest.raises(ServingError, match=r"request 1 is 'a b c', without us it is 'd e'"):
        compare(ANSWERS, [ANSWERS[0], ANSWERS[0]])


def event(text: str, **more: object) -> bytes:
    return f"data: {json.dumps({'choices': [{'text': text}], **more})}\n".encode()


def test_a_stream_is_read_to_its_last_event() -> None:
    lines = [event("a"), b"\n", event(""), event(" b"), event("", usage={"completion_tokens": 5})]
    found = read_stream(lines, asked=0.0)
    assert (found.text, found.tokens, len(found.parts)) == ("a b", 5, 2)
    assert list(found.parts) == sorted(found.parts) and found.ended >= found.parts[-1]


@pytest.mark.parametrize("lines", [[b'data: {"error": "an "inner" one"}\n'], [event("")], []])
def test_a_stream_without_a_text_is_an_error(lines: list[bytes]) -> None:
    with pytest.raises(ServingError, match="a text was asked for; found"):
        read_stream(lines, asked=0.0)


def test_all_prompts_are_asked_for_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_ask", lambda port, prompt, tokens: (port, prompt, tokens))
    texts = runner.prompts(9)
    assert client.closed_loop(7, texts, 3, 4) == [(7, text, 3) for text in texts]
    assert texts == runner.prompts(9) and len(set(texts)) == 9


def test_the_table_compares_a_server_with_the_one_without_us() -> None:
    lines = list(table([Row(Load(4, 8, 8, 1), Figures(10, 0.1, 0.2, 0.03, 0.04), Figures(25, 0, 0, 0, 0))]))
    assert lines[2] == "| 4 | without us | 10.0 | 1.00 | 100.0 | 200.0 | 30.0 | 40.0 |\n"
    assert lines[3].startswith("| 4 | with us | 25.0 | 2.50 |")


@pytest.mark.full
def test_a_server_that_does_not_start_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(tmp_path / "no-model"), "--threads", "1"]) == 1
    assert "transformers serve does not answer" in capsys.readouterr().err


@pytest.mark.full
def test_two_servers_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if any(importlib.util.find_spec(name) is None for name in ("fastapi", "uvicorn", "openai")):
        pytest.skip("transformers serve is not installed: pip install '.[serve]'")
    file = tmp_path / "figures.json"
    load = ["--at-once", "1", "2", "--requests", "4", "--tokens", "8", "--rounds", "1", "--threads", "1"]
    assert command.main([str(MODEL), *load, "--json", str(file)]) == 0
    assert capsys.readouterr().out.count("with us") == 2
    rows = json.loads(file.read_text())
    assert [row["load"]["at_once"] for row in rows] == [1, 2]
    assert all(row[name]["tokens_s"] > 0 for row in rows for name in ("plain", "ours"))
