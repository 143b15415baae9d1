"""``transformers serve``, by `run`: each request is answered or refused as it is without us."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from serve import plan
from serve.accounts import Accounts, steps
from serve.plan import Planned
from serve.server import MODEL, Server, chat_model, served

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("needs_serving")]

#: So many tokens take longer than any of these tests may: who makes them for nobody answers nobody else.
ENDLESS = 1_000_000
#: With less memory than transformers takes by itself: almost all there is.
CONTINUOUS = ("--continuous-batching", "--cb-num-blocks", "512", "--cb-block-size", "32")
#: What the status says of steps that no program makes, of a server that does nothing but decode.
EXPECTED = (
    "of a kind that has not come often enough",
    "the first token behind a prompt",
    "what is kept moves to a larger buffer",
    "watched, to record the next one",
    "recorded",
)
_TEXT = [{"type": "text", "text": "What news?"}]
#: Requests that transformers answers so, with us or without: (path, body, status). See docs/serving.md.
ANSWERS = [
    ("completions", {"prompt": "a", "max_tokens": 0}, 500),
    ("completions", {"prompt": "a", "max_tokens": -1}, 500),
    ("completions", {"prompt": "a", "max_tokens": "many"}, 500),
    ("completions", {"prompt": "", "max_tokens": 2}, 500),
    ("completions", {"prompt": "a", "max_tokens": 2, "generation_config": "no JSON"}, 500),
    ("completions", {"prompt": "a", "max_tokens": 2, "n": 2}, 200),
    ("completions", {"prompt": "a", "max_tokens": 2, "temperature": -1}, 200),
    ("chat/completions", {"max_tokens": 2}, 500),
    ("chat/completions", {"max_tokens": 2, "messages": "no list"}, 500),
    ("chat/completions", {"max_tokens": 2, "messages": [{"role": "user", "content": _TEXT}]}, 200),
    ("no/such/path", {}, 404),
]


def soaked(folder: Path, requests: list[Planned], at_once: int, *options: str) -> tuple[Accounts, Server]:
    from serve import soak  # which needs what may be missing

    prompts = sorted({request.prompt for request in requests})
    texts = soak.alone(MODEL, prompts, plan.TOKENS)
    with served(chat_model(folder), folder, *options) as server:
        return asyncio.run(soak.soaked(server, requests, texts, at_once)), server


def check(accounts: Accounts, count: int) -> None:
    assert not accounts.faults, "\n".join(accounts.lines())
    assert accounts.right.total() == count  # with those that ran while the server was told to end
    assert accounts.exit_status == -signal.SIGTERM
    assert all(accounts.after[name] <= accounts.before[name] for name in accounts.before), accounts.lines()


def test_every_request_is_answered_as_planned(tmp_path: Path) -> None:
    """Cancelled, malformed and long ones among them; the server ends when its last streams have ended."""
    requests = plan.planned(200, 1, plan.prompts(32, 1))
    accounts, server = soaked(tmp_path, requests, 16)
    check(accounts, 200 + 8)
    found = steps(server.status())
    assert found.served > 500
    assert all(reason.startswith(EXPECTED) for reason in found.fallbacks), found.fallbacks


def test_two_hundred_connections_at_once(tmp_path: Path) -> None:
    texts = plan.prompts(32, 2)
    requests = [
        Planned(number, plan.GREEDY, texts[number % 32], 1 + number % 8, True) for number in range(230)
    ]
    accounts, _ = soaked(tmp_path, requests, 200)
    check(accounts, 230 + 8)


def test_continuous_batching_gives_the_same_texts(tmp_path: Path) -> None:
    requests = plan.planned(100, 3, plan.prompts(32, 3))
    accounts, server = soaked(tmp_path, requests, 16, *CONTINUOUS)
    check(accounts, 100 + 8)
    calls = {rule["id"]: rule["calls"] for rule in server.status()["rules"]}
    assert calls["paged.sdpa"] > 100 and calls["norm.rms"] > 100


@pytest.mark.parametrize(("path", "body", "status"), ANSWERS)
def test_an_answer_that_docs_name(path: str, body: dict[str, object], status: int, server: Server) -> None:
    from serve.client import Client

    async def asked() -> tuple[int, int]:
        client = Client(server, {})
        found = await client.status_of(path, json.dumps(body))
        after = await client.status_of("completions", json.dumps({"prompt": "a", "max_tokens": 1}))
        await client.close()
        return found, after

    assert asyncio.run(asked()) == (status, 200)


def test_streams_that_nobody_reads_any_more_end(server: Server) -> None:
    """Also of clients that were gone before it was their turn."""
    from serve.client import Client

    async def asked() -> str:
        client = Client(server, {})
        kinds = [plan.CANCELLED, *[plan.VANISHED] * 3]
        left = [Planned(1, kind, "What news?", ENDLESS, True) for kind in kinds]
        assert not any(await asyncio.gather(*map(client.fault_of, left)))
        text = await client.text("What news?", 4, stream=False)
        await client.close()
        return text

    assert asyncio.run(asked())
