"""``bench.serving`` as a command, with servers of a few lines in place of ``transformers serve``."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from liteboost_adaptor.bench.serving import __main__ as command
from liteboost_adaptor.bench.serving.client import ServingError, closed_loop
from liteboost_adaptor.bench.serving.runner import OURS, PLAIN, WARM_UP
from liteboost_adaptor.bench.serving.server import PORT, serving, transformers_command

#: Streams two words of the prompt, notes what it was asked for, and at level 1 says something else.
SERVER = """
import http.server, json, sys
port, level, log = sys.argv[1:4]
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass
    def answer(self, status):
        self.send_response(status)
        self.end_headers()
    def do_GET(self):
        self.answer(200 if self.path == "/health" else 404)
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/completions" and asked["stream"] and asked["temperature"] == 0
        with open(log, "a") as file:
            file.write(json.dumps([level, asked["max_tokens"]]) + chr(10))
        if level == "broken":
            self.answer(503)
            self.wfile.write(b"no memory")
            return
        self.answer(200)
        words = asked["prompt"].split()[:2] if level != "1" else ["something", "else"]
        events = [{"choices": [{"text": " " + word}]} for word in words]
        events[-1]["usage"] = {"completion_tokens": asked["max_tokens"]}
        for each in events:
            self.wfile.write(b"data: " + json.dumps(each).encode() + b"\\n\\n")
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\\n\\n")
http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "asked.jsonl"


def started(log: Path, level: str | None) -> list[str]:
    return [sys.executable, "-S", "-c", SERVER, PORT, str(level), str(log)]


@pytest.fixture(autouse=True)
def stand_ins(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stand_in(model: Path, level: str | None, options: Sequence[str]) -> list[str]:
        assert options == ["--dtype", "float32"]
        return started(log, level)

    monkeypatch.setattr(command, "transformers_command", stand_in)


LOAD = ["--at-once", "2", "--rate", "1000", "--requests", "3", "--tokens", "8", "--rounds", "2"]


def test_servers_get_the_same_load_and_the_figures_are_written(
    tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--json", str(tmp_path / "figures.json"), "--plot", str(tmp_path / "figures.png")]
    assert command.main(["model", *LOAD, "--threads", "1", *files]) == 0
    out, err = capsys.readouterr()
    assert [line.split("|")[1:3] for line in out.splitlines()[2:]] == [
        [f" {load} ", f" {name} "] for load in ("2", "1000/s") for name in (PLAIN, OURS)
    ]
    assert err.count("load ") == 2 and f"load 1000/s: {PLAIN} " in err
    rows = json.loads((tmp_path / "figures.json").read_text())
    assert [row["load"]["at_once"] for row in rows] == [2, None]
    for row in rows:
        assert list(row["servers"]) == [PLAIN, OURS]
        for figures in row["servers"].values():
            assert figures["tokens_s"] > 0 < figures["peak_rss_mb"]
            assert 0 < figures["first_p50_s"] <= figures["first_p99_s"]
            assert 0 <= figures["next_p50_s"] <= figures["next_p99_s"]
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")
    # Before the first round each is warmed up, by as many clients as there are: 2, and 3 of an open loop.
    asked = Counter(tuple(json.loads(line)) for line in log.read_text().splitlines())
    assert asked == {
        **{(level, WARM_UP): 2 + 3 for level in ("None", "2")},
        **{(level, 8): 2 * 2 * 3 for level in ("None", "2")},
    }


@pytest.mark.parametrize("texts", ["same", "any"])
def test_other_texts_than_without_us_are_an_error_unless_any_will_do(
    texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ["--at-once", "1", "--requests", "1", "--tokens", "8", "--rounds", "1", "--threads", "1"]
    code = command.main(["model", *load, "--level", "1", "--texts", texts])
    out, err = capsys.readouterr()
    assert code == (texts == "same")
    assert ("the greedy text of request 0 is ' something else'" in err) is (texts == "same")
    assert (OURS in out) is (texts == "any")


def test_a_request_that_is_not_answered_is_an_error(log: Path) -> None:
    with (
        serving(started(log, "broken"), 1) as server,
        pytest.raises(ServingError, match=r"found status 503: b'no memory'"),
    ):
        closed_loop(server.port, ["to be"], 8, 1)


@pytest.mark.parametrize(
    ("level", "run"), [(None, []), ("1", ["-m", "liteboost_adaptor", "run", "--level", "1"])]
)
def test_the_server_with_us_is_the_same_command_by_run(level: str | None, run: list[str]) -> None:
    found = transformers_command(Path("model"), level, ["--dtype", "float32"])
    served = ["-m", "transformers.cli.transformers", "serve", "model", "--host", "127.0.0.1"]
    assert found == [sys.executable, *run, *served, "--port", PORT, "--dtype", "float32"]
