"""Processes that work together: each runs one function of a test module and returns its result."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import forked

_MARK = "RESULT "

#: Numbers of the groups that were started.
_groups = itertools.count()
#: How long ranks wait for missing ones outside of tests; here they wait longer, on machines that are busy.
usual: dict[str, float] = {}


def wait_as_usual() -> None:
    """Let this rank wait no longer for others than outside of tests."""
    from liteboost_adaptor.parallel.runtime import heartbeat

    vars(heartbeat.timeouts).update(usual)


@dataclass
class Rank:
    """A process of a group, the file that has its output, and the port where the group meets."""

    process: Any
    output: Path
    port: socket.socket


def reserved() -> socket.socket:
    """A port that nobody else is given while this lives, and that a rank may listen on.

    Between asking for a free port and listening on it a rank starts, which takes seconds; other ranks' own
    connections would be given the same port meanwhile, now and then.
    """
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    # From now on who says the same may bind it, too, as what listens for the ranks does.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return held


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ranks-")


def start(
    world_size: int,
    job: str,
    *arguments: Any,
    each: list[dict[str, str]] | None = None,
    left_out: tuple[int, ...] = (),
    **changes: str,
) -> list[Rank]:
    """Start ``module:function`` in so many processes, as ``torchrun`` would; ``arguments`` go by JSON.

    Args:
        each: Variables of the single ranks, beside ``changes``, which all have.
        left_out: Ranks that are not started.
    """
    from support import processes  # imports our package, which a rank does under its own variables

    held, group = reserved(), next(_groups)
    port = str(held.getsockname()[1])
    found = []
    for rank in sorted({*range(world_size)} - {*left_out}):
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        environment = processes.environment(**(variables | changes | (each[rank] if each else {})))
        output = Path(_folder().name) / f"{group}-{rank}"
        process = forked.start(_run, job, json.dumps(arguments), environment=environment, output=output)
        found.append(Rank(process, output, held))
    return found


def finish(ranks: list[Rank], timeout: float = 300) -> list[tuple[int | None, str]]:
    """(exit status, output) of each; who has not ended in time is killed, and has None for a status."""
    deadline = time.monotonic() + timeout
    for rank in ranks:
        rank.process.join(max(0.1, deadline - time.monotonic()))
    found = []
    for rank in ranks:
        status = rank.process.exitcode
        if status is None:
            rank.process.kill()
            rank.process.join()
        text = rank.output.read_text(encoding="utf-8", errors="replace") if rank.output.exists() else ""
        found.append((status, text))
    return found


def run(world_size: int, job: str, *arguments: Any, timeout: float = 300, **changes: str) -> list[Any]:
    """What ``module:function`` returns on each rank; fails with their output when one fails."""
    done = finish(start(world_size, job, *arguments, **changes), timeout)
    failed = [
        f"rank {rank}, exit {code}:\n{text[-3000:]}" for rank, (code, text) in enumerate(done) if code != 0
    ]
    assert not failed, "\n".join(failed)
    return [result(text) for _, text in done]


def result(output: str) -> Any:
    """What the function returned, from the output of its rank."""
    return json.loads(output.rpartition(_MARK)[2].splitlines()[0])


def report(value: Any) -> None:
    """Print what the function returns; for one that does not return."""
    sys.stdout.write("\n" + _MARK + json.dumps(value) + "\n")
    sys.stdout.flush()


def _run(job: str, arguments: str) -> None:
    import torch
    import torch.distributed as dist

    from liteboost_adaptor.parallel.runtime import heartbeat

    torch.set_num_threads(1)
    usual.update(vars(heartbeat.timeouts))
    heartbeat.timeouts.start = heartbeat.timeouts.absent = heartbeat.COLLECTIVE_TIMEOUT_S
    module, _, function = job.partition(":")
    report(getattr(importlib.import_module(module), function)(*json.loads(arguments)))
    if dist.is_initialized():
        dist.destroy_process_group()
