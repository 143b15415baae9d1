"""A ``transformers serve`` of this machine."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from ...config import child_environment
from .client import PATIENCE, ServingError

_COMMAND = ("-m", "transformers.cli.transformers", "serve")


@contextmanager
def serving(model: Path, level: str | None, threads: int, options: Sequence[str]) -> Iterator[int]:
    """The port of a server of ``model``, until the block ends.

    Args:
        level: `LITEBOOST_LEVEL`; None runs it without us.
        options: Of the server.

    Raises:
        ServingError: It ended before it answered, or did not answer; with the end of its log.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = [] if level is None else ["-m", "liteboost_adaptor", "run", "--level", level]
    arguments = [str(model), "--host", "127.0.0.1", "--port", str(port), *options]
    environment = child_environment(
        OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads), HF_HUB_OFFLINE="1"
    )
    with TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, *run, *_COMMAND, *arguments], stdout=log, stderr=log, env=environment
        )
        try:
            if not _answers(process, port):
                log.seek(0)
                said = log.read()[-2000:].decode(errors="replace")
                raise ServingError(
                    "transformers serve does not answer. If packages are missing: "
                    f"pip install 'liteboost_adaptor[serve]'. It says:\n{said}"
                )
            yield port
        finally:
            process.kill()
            process.wait()


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            time.sleep(0.2)
        finally:
            connection.close()
    return False
