"""Clients that ask a server for streamed texts: some that wait for theirs, or as many as come."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

from ...errors import LiteBoostError
from .figures import Answer

#: Seconds after which a server does not answer any more.
PATIENCE = 600.0


class ServingError(LiteBoostError, RuntimeError):
    """A server did not start or answer, or gave other texts than without us."""


def closed_loop(port: int, prompts: Sequence[str], tokens: int, at_once: int) -> list[Answer]:
    """Greedy texts of ``tokens`` tokens behind all ``prompts``, ``at_once`` at a time.

    Raises:
        ServingError: A request was not answered with a text.
    """
    with ThreadPoolExecutor(at_once) as clients:
        return list(clients.map(lambda prompt: _ask(port, prompt, tokens), prompts))


def open_loop(port: int, prompts: Sequence[str], tokens: int, rate: float, seed: int = 0) -> list[Answer]:
    """As `closed_loop`, but requests arrive at random times, ``rate`` a second on average.

    Arrivals are a Poisson process: the times between them are exponential.

    Raises:
        ServingError: A request was not answered with a text.
    """
    drawn, begin = random.Random(seed), time.perf_counter()
    arrivals = list(accumulate(drawn.expovariate(rate) for _ in prompts))

    def ask(prompt: str, arrival: float) -> Answer:
        time.sleep(max(0.0, begin + arrival - time.perf_counter()))
        return _ask(port, prompt, tokens)

    with ThreadPoolExecutor(len(prompts)) as clients:
        return list(clients.map(ask, prompts, arrivals))


def _ask(port: int, prompt: str, tokens: int) -> Answer:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        asked = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise ServingError(f"a text was asked for; found status {response.status}: {response.read()!r}")
        return read_stream(response, asked)
    finally:
        connection.close()


def read_stream(lines: http.client.HTTPResponse | Sequence[bytes], asked: float) -> Answer:
    """The answer in the events of a stream, which are lines of ``data: `` and JSON.

    Raises:
        ServingError: An event is an error, or there is no text.
    """
    parts, texts, made = [], [], 0
    for line in lines:
        if not line.startswith(b"data: "):
            continue
        event = line.removeprefix(b"data: ").strip()
        if event == b"[DONE]":
            break
        if event.startswith(b'{"error"'):  # what follows is not always JSON
            raise ServingError(f"a text was asked for; found {event.decode(errors='replace')}")
        found = json.loads(event)
        if text := found["choices"][0]["text"]:
            parts.append(time.perf_counter())
            texts.append(text)
        made = (found.get("usage") or {}).get("completion_tokens", made)
    if not parts:
        raise ServingError("a text was asked for; found a stream without one. See the log of the server.")
    return Answer(asked, tuple(parts), time.perf_counter(), made, "".join(texts))
