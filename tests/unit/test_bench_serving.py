"""What clients see of a server: the arithmetic of the figures, and what is read of a stream."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import shlex
import signal
import sys
import threading
from pathlib import Path

import pytest

from liteboost_adaptor.bench.serving import __main__ as command
from liteboost_adaptor.bench.serving import client, report, runner, server
from liteboost_adaptor.bench.serving.client import ServingError, read_stream
from liteboost_adaptor.bench.serving.figures import Answer, Figures, medians, percentile, summarise
from liteboost_adaptor.bench.serving.report import table
from liteboost_adaptor.bench.serving.runner import OURS, PLAIN, Load, Row, compare

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
    found = summarise(ANSWERS, 77.0)
    assert found.tokens_s == pytest.approx(6 / 2)  # from the first request to the end of the last answer
    assert (found.first_p50_s, found.first_p99_s) == pytest.approx((0.5, 1.0))
    assert (found.next_p50_s, found.next_p99_s) == pytest.approx((0.2, 0.3))
    assert found.peak_rss_mb == 77.0


def test_each_figure_has_a_median_of_its_own() -> None:
    rounds = [Figures(1, 5, 1, 1, 1, 7), Figures(2, 3, 1, 1, 9, 7), Figures(3, 4, 1, 1, 5, 8)]
    assert medians(rounds) == Figures(2, 4, 1, 1, 5, 7)


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


def test_requests_of_an_open_loop_come_whatever_is_running(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, lock = 0, 0, threading.Lock()
    all_there = threading.Barrier(5)

    def ask(port: int, prompt: str, tokens: int) -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        all_there.wait(timeout=60)  # nobody is answered before everybody has asked
        with lock:
            running -= 1
        return prompt

    monkeypatch.setattr(client, "_ask", ask)
    load = Load(None, 5, 8, 1, rate=1000.0)
    assert load.ask(7, list("abcde"), 8) == list("abcde")
    assert most == 5 and str(load) == "1000/s" and str(Load(4, 5, 8, 1)) == "4"


def test_arrivals_are_random_and_of_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(client.time, "sleep", slept.append)
    monkeypatch.setattr(client.time, "perf_counter", lambda: 100.0)
    monkeypatch.setattr(client, "_ask", lambda port, prompt, tokens: prompt)
    client.open_loop(7, ["a"] * 400, 8, rate=2.0)
    arrivals = sorted(slept)
    gaps = [later - sooner for sooner, later in itertools.pairwise([0.0, *arrivals])]
    assert sum(gaps) / 400 == pytest.approx(0.5, rel=0.15)
    # Of exponential times 63 % are below their mean.
    assert sum(gap < 0.5 for gap in gaps) / 400 == pytest.approx(1 - math.exp(-1), abs=0.08)


def test_the_table_compares_servers_with_the_one_without_us(tmp_path: Path) -> None:
    figures = {PLAIN: Figures(10, 0.1, 0.2, 0.03, 0.04, 99), OURS: Figures(25, 0, 0, 0, 0, 0)}
    rows = [Row(Load(4, 8, 8, 1), figures), Row(Load(None, 8, 8, 1, 0.5), figures)]
    lines = list(table(rows))
    assert lines[2] == "| 4 | without us | 10.0 | 1.00 | 100.0 | 200.0 | 30.0 | 40.0 | 99 |\n"
    assert lines[3].startswith("| 4 | with us | 25.0 | 2.50 |")
    assert lines[4].startswith("| 0.5/s | without us |")
    report.plot(rows, tmp_path / "serving.png")
    assert (tmp_path / "serving.png").read_bytes().startswith(b"\x89PNG")


def test_a_command_gets_a_free_port_and_its_memory_is_read() -> None:
    code = (
        "import http.server, sys, os, time\n"
        "if os.fork() == 0: held = bytearray(64 << 20); time.sleep(600)\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self): self.send_response(200); self.end_headers()\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()"
    )
    with server.serving([sys.executable, "-c", code, server.PORT], 1) as found:
        children = [pid for pid in server._family(found.pid) if pid != found.pid]
        try:
            assert len(children) == 1
            assert found.peak_rss_mb() > sum(map(server._peak_kib, children)) / 1024 > 0
        finally:
            os.kill(children[0], signal.SIGKILL)
    with pytest.raises(ServingError, match="no-such-server 1 does not start"):
        with server.serving(["no-such-server", "1"], 1):
            pass
    with pytest.raises(ServingError, match="does not answer"):
        with server.serving([sys.executable, "-c", "print('bye')"], 1):
            pass


@pytest.mark.parametrize(
    "option",
    [
        ["--peer", "llama=llama-server"],
        ["--peer", f"with us=llama-server {server.PORT}"],
        ["--rate", "0"],
        ["--rate", "-1"],
    ],
)
def test_options_that_cannot_be_measured_are_refused(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main([str(MODEL), *option])
    assert "found" in capsys.readouterr().err


def test_a_load_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main([str(MODEL), "--at-once"])
    assert "give --at-once or --rate a number" in capsys.readouterr().err


@pytest.mark.full
def test_a_server_that_does_not_start_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(tmp_path / "no-model"), "--threads", "1"]) == 1
    said = capsys.readouterr().err
    assert "does not answer" in said and "no-model" in said


@pytest.mark.full
def test_two_servers_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if any(importlib.util.find_spec(name) is None for name in ("fastapi", "uvicorn", "openai")):
        pytest.skip("transformers serve is not installed: pip install '.[serve]'")
    file = tmp_path / "figures.json"
    load = ["--at-once", "1", "2", "--rate", "4", "--requests", "4", "--tokens", "8"]
    load += ["--rounds", "1", "--threads", "1"]
    served = shlex.join(server.transformers_command(MODEL, None, ["--dtype", "float32"]))
    assert command.main([str(MODEL), *load, "--json", str(file), "--peer", f"again={served}"]) == 0
    assert capsys.readouterr().out.count("with us") == 3
    rows = json.loads(file.read_text())
    assert [row["load"]["at_once"] for row in rows] == [1, 2, None]
    for row in rows:
        assert set(row["servers"]) == {PLAIN, OURS, "again"}
        assert all(figures["tokens_s"] > 0 < figures["peak_rss_mb"] for figures in row["servers"].values())
