"""``examples/ray/completions.py`` on two nodes: replicas answer with the texts of ``generate`` alone."""

from __future__ import annotations

import functools
import importlib.util
import json
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from clusters import nodes
from clusters.nodes import MODEL, Nodes

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("needs_ray", "native_only")]

PROMPTS = ["ROMEO:\nWhat light is this, that", "What news?", "First Citizen:\n", "O speak again, fair lord"]
TOKENS = 16


@dataclass
class Server:
    """A running example."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def open(self, path: str, body: dict[str, Any] | None = None) -> str:
        """What a path answers; an error's text begins with its HTTP status."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=nodes.PATIENCE) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as fault:
            return f"{fault.code} {fault.read().decode()}"
        except OSError as fault:  # not there yet
            return f"0 {fault}"

    def complete(self, prompt: str, **how: Any) -> str:
        return self.open("/v1/completions", {"prompt": prompt, "max_tokens": TOKENS, **how})

    def text(self, prompt: str, **how: Any) -> str:
        (choice,) = json.loads(self.complete(prompt, **how))["choices"]
        assert choice["finish_reason"] in ("length", "stop")
        return choice["text"]

    def streamed(self, prompt: str, **how: Any) -> str:
        *events, end = self.complete(prompt, stream=True, **how).split("\n\n")[:-1]
        assert end == "data: [DONE]"
        choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
        assert [each["finish_reason"] is None for each in choices] == [True] * (len(choices) - 1) + [False]
        return "".join(each["text"] for each in choices)

    def statuses(self, count: int) -> dict[int, dict[str, Any]]:
        """Of each of so many replicas, by the number of its process; which one answers is up to Ray."""
        found: dict[int, dict[str, Any]] = {}
        for _ in range(200):
            status = json.loads(self.open("/status"))
            found[status["process"]] = status
            if len(found) == count:
                break
        return found

    def answers(self) -> bool:
        return self.open("/status").startswith("{")


@pytest.fixture(scope="module")
def two_nodes(needs_ray: None) -> Iterator[Nodes]:
    with nodes.cluster(2, cpus=2) as found:
        yield found


@pytest.fixture(scope="module")
def texts(needs_ray: None) -> dict[str, str]:
    return nodes.alone(PROMPTS, TOKENS)


@contextmanager
def served(cluster: Nodes, folder: Path, *options: Any) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "server.log"
    arguments = (MODEL, "--dtype", "float32", "--port", port, *options)
    with cluster.program(log, "completions.py", *arguments) as process:
        server = Server(process, port, log)
        nodes.wait(lambda: "is ready at" in log.read_text(errors="replace"), process, log)
        nodes.wait(server.answers, process, log)
        yield server
        process.send_signal(signal.SIGINT)
        assert process.wait(nodes.PATIENCE) == 0, log.read_text(errors="replace")[-4000:]


def check_texts(server: Server, texts: dict[str, str]) -> None:
    """Greedy texts are those of `generate` alone, and a seed gives a sampled text again."""
    asked = PROMPTS * 4
    with ThreadPoolExecutor(len(asked)) as threads:
        assert list(threads.map(functools.partial(server.text, temperature=0), asked)) == [
            texts[prompt] for prompt in asked
        ]
    assert [server.streamed(prompt, temperature=0) for prompt in PROMPTS] == [texts[each] for each in PROMPTS]
    drawn = [server.text(PROMPTS[0], temperature=0.9, top_p=0.9, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert server.streamed(PROMPTS[0], temperature=0.9, top_p=0.9, seed=1) == drawn[0]


def check_openai(server: Server, texts: dict[str, str]) -> None:
    """The ``openai`` package gets the texts, too, as a whole and as a stream."""
    from openai import OpenAI

    asked: dict[str, Any] = {"model": "any", "prompt": PROMPTS[0], "max_tokens": TOKENS, "temperature": 0}
    with OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none") as client:
        whole = client.completions.create(**asked)
        assert whole.choices[0].text == texts[PROMPTS[0]] and whole.usage.completion_tokens == TOKENS
        parts = [each.choices[0].text for each in client.completions.create(**asked, stream=True)]
        assert len(parts) > 2 and "".join(parts) == texts[PROMPTS[0]]


def check_served(status: dict[str, Any]) -> None:
    for rank in status["ranks"]:
        calls = {rule["id"]: rule["calls"] for rule in rank["rules"]}
        assert calls["norm.rms"] > 0 and calls["attention.sdpa"] > 0


def test_two_replicas_on_two_nodes(two_nodes: Nodes, texts: dict[str, str], tmp_path: Path) -> None:
    with served(two_nodes, tmp_path, "--replicas", 2) as server:
        check_texts(server, texts)
        found = server.statuses(2)
        assert len({status["node"] for status in found.values()}) == len(found) == 2
        for status in found.values():
            assert len(status["ranks"]) == 1
            check_served(status)
        if importlib.util.find_spec("openai"):  # of the extra `serve`
            check_openai(server, texts)
        for body, said in (
            ({"prompt": ""}, "400"),
            ({"prompt": "a", "max_tokens": 2000}, "400"),
            ({"prompt": "a", "max_tokens": 0}, "422"),
            ({"prompt": ["a"]}, "422"),
        ):
            assert server.open("/v1/completions", body).startswith(said)


def test_a_replica_of_two_ranks(two_nodes: Nodes, texts: dict[str, str], tmp_path: Path) -> None:
    """And where a rank is killed, both are replaced."""
    with served(two_nodes, tmp_path, "--tp", 2) as server:
        check_texts(server, texts)
        ((process, status),) = server.statuses(1).items()
        assert len(status["ranks"]) == 2
        check_served(status)
        (follower,) = [each for node in range(2) for each in two_nodes.workers(node, "ray::Follower")]
        follower.kill()
        answered = nodes.wait(lambda: _of_another(server, process), server.process, server.log)
        assert len(answered["ranks"]) == 2
        assert server.text(PROMPTS[0], temperature=0) == texts[PROMPTS[0]]
        assert not psutil.pid_exists(process)


def _of_another(server: Server, process: int) -> dict[str, Any] | None:
    """The status, where another process than ``process`` answers."""
    said = server.open("/status")
    status = json.loads(said) if said.startswith("{") else {"process": process}
    return status if status["process"] != process else None
