"""Many requests to a server, some wrong by plan: is each answered as it should be, and what is left over?"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from support import processes

from . import plan
from .accounts import Accounts
from .client import Client
from .plan import Planned
from .server import PATIENCE, Server

#: Requests before the counts of threads and descriptors are taken that the end is compared with.
_FIRST = 30
#: Streams that run when the server is told to end.
LAST = 8


def alone(model: Path, texts: list[str], tokens: int) -> dict[str, list[str]]:
    """For each of ``texts`` what ``generate`` alone puts behind it: the texts of 0 to ``tokens`` tokens."""
    done = subprocess.run(
        [sys.executable, "-m", "serve.alone", str(model), str(tokens)],
        input=json.dumps(texts),
        env=processes.environment(HF_HUB_OFFLINE="1"),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


async def soaked(
    server: Server, requests: list[Planned], texts: dict[str, list[str]], at_once: int
) -> Accounts:
    """Make all ``requests``, ``at_once`` at a time, and then end the server while streams run."""
    accounts, client = Accounts(), Client(server, texts)
    started = time.monotonic()
    first, others = requests[:_FIRST], requests[_FIRST:]
    await _make(client, server, first, at_once, accounts)
    await client.close()
    await _quiet(server)
    accounts.before = server.held()
    client = Client(server, texts)
    await _make(client, server, others, at_once, accounts)
    await client.close()
    accounts.seconds = time.monotonic() - started
    await _quiet(server, accounts.before)
    accounts.after = server.held()
    await _end(server, texts, accounts)
    return accounts


async def _make(
    client: Client, server: Server, requests: list[Planned], at_once: int, accounts: Accounts
) -> None:
    waiting = iter(requests)

    async def work() -> None:
        for request in waiting:
            accounts.add(request, await client.fault_of(request))
            accounts.memory.append(server.memory())

    await asyncio.gather(*(work() for _ in range(at_once)))


async def _quiet(server: Server, wanted: dict[str, int] | None = None) -> None:
    """Wait until the server holds no more than ``wanted``, or what it holds does not change any more."""
    until, last = time.monotonic() + 30, None
    while time.monotonic() < until:
        held = server.held()
        if held == last if wanted is None else all(held[name] <= wanted[name] for name in held):
            return
        last = held
        await asyncio.sleep(2)


async def _end(server: Server, texts: dict[str, list[str]], accounts: Accounts) -> None:
    """SIGTERM while streams run: each is finished, and nobody is answered any more."""
    client = Client(server, texts)
    prompts = [text for text in texts if text != plan.long_prompt(0) and text != plan.long_prompt(1)]
    last = [Planned(-1 - n, plan.GREEDY, prompts[n], plan.TOKENS, True) for n in range(LAST)]
    before = received(server)
    running = [asyncio.ensure_future(client.fault_of(request)) for request in last]
    until = time.monotonic() + PATIENCE
    while received(server) < before + len(last) and time.monotonic() < until:
        await asyncio.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    for request, fault in zip(last, await asyncio.gather(*running), strict=True):
        accounts.add(request, fault)
    accounts.exit_status = await asyncio.to_thread(server.process.wait, PATIENCE)
    await client.close()


def received(server: Server) -> int:
    """Of how many requests the server has said that it has them."""
    return server.log.read_bytes().count(b"[Request received]")
