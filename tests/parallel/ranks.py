"""Processes that work together: each runs one function of a test module and returns its result."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support import processes

_MARK = "RESULT "


def free_port() -> int:
    """A port nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(world_size: int, job: str, *arguments: Any, **changes: str) -> list[subprocess.Popen[str]]:
    """Start ``module:function`` in so many processes, as ``torchrun`` would; ``arguments`` go by JSON."""
    port = str(free_port())
    found = []
    for rank in range(world_size):
        environment = processes.environment(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            **changes,
        )
        command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), job, json.dumps(arguments)]
        found.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    return found


def finish(ranks: list[subprocess.Popen[str]], timeout: float = 300) -> list[tuple[int, str]]:
    """(exit status, output) of each; who has not ended in time is killed, and has None for a status."""
    deadline = time.monotonic() + timeout
    found = []
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.wait(max(0.1, deadline - time.monotonic()))
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
        output, _ = rank.communicate()
        found.append((rank.returncode, output))
    return found


def run(world_size: int, job: str, *arguments: Any, timeout: float = 300, **changes: str) -> list[Any]:
    """What ``module:function`` returns on each rank; fails with their output when one fails."""
    done = finish(start(world_size, job, *arguments, **changes), timeout)
    failed = [f"rank {rank}, exit {code}:\n{text[-3000:]}" for rank, (code, text) in enumerate(done) if code]
    assert not failed, "\n".join(failed)
    return [_result(text) for _, text in done]


def _result(output: str) -> Any:
    lines = [line for line in output.splitlines() if line.startswith(_MARK)]
    return json.loads(lines[-1].removeprefix(_MARK))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    import torch

    torch.set_num_threads(1)
    yield


def _main() -> None:
    module, _, function = sys.argv[1].partition(":")
    with _one_thread():
        result = getattr(importlib.import_module(module), function)(*json.loads(sys.argv[2]))
    sys.stdout.write(_MARK + json.dumps(result) + "\n")
    sys.stdout.flush()
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        _main()
    except BaseException:  # noqa: BLE001 - the process ends with it
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
