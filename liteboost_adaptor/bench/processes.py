"""Worker processes of a benchmark: started alike, asked over pipes, always ended."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from .. import config
from ..errors import LiteBoostError
from . import worker

#: Seconds a worker that was told to end may take before it is killed.
GRACE_SECONDS = 10


class WorkerError(LiteBoostError, RuntimeError):
    """A worker process failed or ended before it answered."""


class Asked(Protocol):
    """What answers requests."""

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for its answer."""


class Worker:
    """One process running ``worker.py``, and the pipe to it."""

    def __init__(
        self,
        name: str,
        threads: int,
        logs: Path,
        level: int | None = None,
        quant: str | None = None,
        rank: dict[str, str] | None = None,
        variables: dict[str, str] | None = None,
        program: Sequence[str] = (sys.executable, worker.__file__),
    ) -> None:
        """
        Args:
            name: Of the variant, for messages.
            threads: Size of every thread pool in the process.
            logs: Folder for what the process prints.
            level: ``LITEBOOST_LEVEL`` of the process; ``None`` leaves the variable unset.
            quant: ``LITEBOOST_QUANT`` of the process, likewise.
            rank: What a launcher would set, for one process of several.
            variables: More of the environment.
            program: The Python and the file that answer.
        """
        self.name = name
        self.log = logs / f"{name}{rank['RANK'] if rank else ''}.log"
        count = str(threads)
        environment = config.child_environment(
            OMP_NUM_THREADS=count,
            MKL_NUM_THREADS=count,
            HF_HUB_OFFLINE="1",
            TOKENIZERS_PARALLELISM="false",
            LITEBOOST_LEVEL=None if level is None else str(level),
            LITEBOOST_QUANT=quant,
            **(rank or {}),
            **(variables or {}),
        )
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
            )

    def send(self, do: str, **arguments: Any) -> None:
        """Hand over a request without waiting for the answer."""
        with suppress(BrokenPipeError):  # the missing answer says more
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Wait for the answer to the oldest request.

        Raises:
            WorkerError: The worker answered with an error, or ended.
        """
        line = self.process.stdout.readline()
        if not line:
            raise WorkerError(
                f"benchmark worker {self.name!r} ended with status {self.process.wait()} before it answered "
                f"(killed for memory, if -9). It last printed:\n{self._tail()}"
            )
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerError(f"benchmark worker {self.name!r}: {reply['error']}\n{self._tail()}")
        return reply

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        self.send(do, **arguments)
        return self.receive()

    def close(self) -> None:
        """End the process: first by closing its input, then, if it does not listen, by killing it."""
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def _tail(self, lines: int = 20) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class Ranks:
    """Processes over which one model is sharded, asked alike; rank 0 answers for all."""

    def __init__(self, name: str, size: int, threads: int, logs: Path, level: int | None = None) -> None:
        """
        Args:
            name: Of the variant, for messages.
            size: Number of processes.
            threads: Of all of them together.
            logs: As of `Worker`.
            level: As of `Worker`.
        """
        self.name = name
        # Held until the processes end: between now and when rank 0 listens nobody else is given it.
        self._port = socket.socket()
        self._port.bind(("127.0.0.1", 0))
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        common = {
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self._port.getsockname()[1],
        }
        self._workers = [
            Worker(
                name,
                threads // size,
                logs,
                level,
                rank={key: str(value) for key, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()},
            )
            for rank in range(size)
        ]

    def send(self, do: str, **arguments: Any) -> None:
        """Hand every process the request."""
        for rank, each in enumerate(self._workers):
            if "path" in arguments and rank:
                each.send(do, **{**arguments, "path": f"{arguments['path']}.{rank}"})
            else:
                each.send(do, **arguments)

    def receive(self) -> dict[str, Any]:
        """Wait for all; the answer of rank 0, with the memory of all.

        Raises:
            WorkerError: One of them failed.
        """
        replies = [each.receive() for each in self._workers]
        if "peak_rss_mb" in replies[0]:
            replies[0]["peak_rss_mb"] = sum(reply["peak_rss_mb"] for reply in replies)
        return replies[0]

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        self.send(do, **arguments)
        return self.receive()

    def close(self) -> None:
        """End all processes."""
        for each in self._workers:
            with suppress(BrokenPipeError):
                each.process.stdin.close()
        for each in self._workers:
            each.close()
        self._port.close()
