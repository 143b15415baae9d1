"""A server of this machine that speaks the protocol of OpenAI, such as ``transformers serve``."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from ...config import child_environment
from .client import PATIENCE, ServingError

_COMMAND = ("-m", "transformers.cli.transformers", "serve")
#: Stands for the port in a command.
PORT = "{port}"


@dataclass(frozen=True)
class Server:
    """One that answers.

    Attributes:
        port: Of 127.0.0.1.
        pid: Of its process.
    """

    port: int
    pid: int

    def peak_rss_mb(self) -> float:
        """The most memory that it and its children ever held, MiB: the sum of their peaks."""
        return sum(map(_peak_kib, _family(self.pid))) / 1024


def transformers_command(model: Path, level: str | None, options: Sequence[str]) -> list[str]:
    """The command of ``transformers serve``.

    Args:
        model: A folder.
        level: `LITEBOOST_LEVEL`; None runs it without us.
        options: Of the server.
    """
    run = [] if level is None else ["-m", "liteboost_adaptor", "run", "--level", level]
    return [sys.executable, *run, *_COMMAND, str(model), "--host", "127.0.0.1", "--port", PORT, *options]


@contextmanager
def serving(command: Sequence[str], threads: int) -> Iterator[Server]:
    """What ``command`` starts, with a free port in place of `PORT`, until the block ends.

    Raises:
        ServingError: It ended before it answered, or did not answer; with the end of its log.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = child_environment(
        OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads), HF_HUB_OFFLINE="1"
    )
    started = [part.replace(PORT, str(port)) for part in command]
    with TemporaryFile() as log:
        try:
            process = subprocess.Popen(started, stdout=log, stderr=log, env=environment)
        except OSError as fault:
            raise ServingError(f"{' '.join(started)} does not start: {fault}.") from None
        try:
            if not _answers(process, port):
                log.seek(0)
                said = log.read()[-2000:].decode(errors="replace")
                raise ServingError(
                    f"{' '.join(started)} does not answer. If packages are missing: "
                    f"pip install 'liteboost_adaptor[serve]'. It says:\n{said}"
                )
            yield Server(port, process.pid)
        finally:
            process.kill()
            process.wait()


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return True
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.2)
    return False


def _family(pid: int) -> Iterator[int]:
    """A process and all below it, as far as the kernel says."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found = children.read_text().split()
        except OSError:  # it has ended
            continue
        for child in found:
            yield from _family(int(child))


def _peak_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
