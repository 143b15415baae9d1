"""``transformers serve`` over two ranks: rank 0 answers, and neither is left behind when one is killed."""

from __future__ import annotations

import asyncio
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from serve import plan
from serve.server import MODEL, PATIENCE, Server, chat_model, served

pytestmark = [
    pytest.mark.full,
    pytest.mark.usefixtures("needs_serving", "native_only"),
]

CONTINUOUS = ("--continuous-batching", "--cb-num-blocks", "512", "--cb-block-size", "32")
#: Tokens of a text during which a rank is killed: as many as the model has positions for.
_LONG = 900


def ranks_of(server: Server) -> list[psutil.Process]:
    """The processes of the ranks, in their order."""
    found = [each for each in psutil.Process(server.process.pid).children() if "RANK" in each.environ()]
    return sorted(found, key=lambda each: int(each.environ()["RANK"]))


def said_in(fault: BaseException | str) -> str:
    """What the server has said; the package finds no message where transformers puts it."""
    response = getattr(fault, "response", None)
    return response.text if response is not None else str(getattr(fault, "body", fault))


def status_of_reset(server: Server) -> int:
    """The status behind which the model would be unloaded."""
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/reset", b"{}", method="POST")
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        return refused.code


def test_texts_are_those_of_one_process(tmp_path: Path) -> None:
    from serve import soak
    from serve.client import Client

    prompts = plan.prompts(24, 5)
    texts = soak.alone(MODEL, prompts, plan.TOKENS)
    with served(chat_model(tmp_path), tmp_path, *CONTINUOUS, ranks=2) as server:

        async def asked() -> tuple[list[str], int]:
            client = Client(server, texts)
            kinds = [plan.GREEDY] * 20 + [plan.CANCELLED, plan.VANISHED, plan.MALFORMED, plan.UNKNOWN]
            requests = [
                plan.Planned(number, kind, prompts[number], plan.TOKENS, number % 2 == 0)
                for number, kind in enumerate(kinds)
            ]
            faults = list(await asyncio.gather(*map(client.fault_of, requests)))
            status = await asyncio.to_thread(status_of_reset, server)
            faults += [await client.fault_of(requests[0])]
            await client.close()
            return faults, status

        faults, status = asyncio.run(asked())
        assert not any(faults), faults
        assert status == 500  # ranks keep the model; the server goes on
        ranks = ranks_of(server)
        assert len(ranks) == 2
        server.ends()
        psutil.wait_procs(ranks, PATIENCE)
        assert not any(map(psutil.Process.is_running, ranks))
    counts = [{rule["id"]: rule["calls"] for rule in server.status(rank.pid)["rules"]} for rank in ranks]
    assert all(each["paged.sdpa"] > 100 for each in counts)
    assert counts[0]["paged.sdpa"] == counts[1]["paged.sdpa"]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_ends_the_server(tmp_path: Path, killed: int) -> None:
    from serve import soak
    from serve.client import Client

    with served(chat_model(tmp_path), tmp_path, *CONTINUOUS, ranks=2) as server:
        ranks = ranks_of(server)

        async def asked() -> list[BaseException | str]:
            client = Client(server, {})
            await client.text("What news?", 2, stream=False)
            running = [
                asyncio.ensure_future(client.text("What news?", _LONG, stream=stream))
                for stream in (True, False)
            ]
            until = time.monotonic() + PATIENCE
            while soak.received(server) < 1 + len(running) and time.monotonic() < until:
                await asyncio.sleep(0.01)
            ranks[killed].send_signal(signal.SIGKILL)
            found = await asyncio.gather(*running, return_exceptions=True)
            await client.close()
            return found

        found = asyncio.run(asked())
        # Each client is told: by an error in the stream, a status, or a connection that is closed.
        assert all(isinstance(each, Exception) for each in found), found
        if killed:
            assert all(
                "rank 1 (process" in said_in(each) and "has ended" in said_in(each) for each in found
            ), found
        assert server.process.wait(PATIENCE)
        psutil.wait_procs(ranks, PATIENCE)
        assert not any(each.is_running() for each in ranks)


@pytest.mark.parametrize(
    ("has_model", "options", "said"),
    [(True, (), "without --continuous-batching"), (False, CONTINUOUS, "without a model on its command line")],
)
def test_a_server_that_ranks_cannot_share_does_not_start(
    tmp_path: Path, has_model: bool, options: tuple[str, ...], said: str
) -> None:
    model = chat_model(tmp_path) if has_model else None
    with pytest.raises(AssertionError, match=said), served(model, tmp_path, *options, ranks=2):
        pass
