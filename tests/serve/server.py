"""A server of another project, started as users start it, and what of it grows."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from support import processes

MODEL = Path(__file__).parents[2] / "examples" / "models" / "shakespeare-llama"
#: The model's own has none, and a chat needs one.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
#: Seconds until a server answers, or has ended.
PATIENCE = 240.0


@dataclass
class Server:
    """A running ``transformers serve``.

    Attributes:
        model: What it serves; a request names it so.
        status_file: Where it writes the status at its end.
    """

    process: subprocess.Popen[bytes]
    model: str
    port: int
    log: Path
    status_file: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def held(self) -> dict[str, int]:
        """Threads and descriptors of the process."""
        found = psutil.Process(self.process.pid)
        return {"threads": found.num_threads(), "descriptors": found.num_fds()}

    def memory(self) -> int:
        """Bytes that are resident."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def ends(self) -> int:
        """The exit status behind SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)

    def status(self, process: int | None = None) -> dict[str, Any]:
        """What it, or one of its ranks, wrote at its end."""
        written = str(self.status_file).replace("%p", str(process))
        return json.loads(Path(written).read_text())


def chat_model(folder: Path) -> Path:
    """A copy of the small trained model in ``folder``, with a chat template."""
    copied = Path(shutil.copytree(MODEL, folder / MODEL.name))
    (copied / "chat_template.jinja").write_text(TEMPLATE)
    return copied


@contextmanager
def served(
    model: Path | None, folder: Path, *options: str, with_us: bool = True, ranks: int = 1, **variables: str
) -> Iterator[Server]:
    """``transformers serve`` of ``model`` in fp32, by `run` in ``ranks`` or alone, until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command: Sequence[str] = [str(Path(sys.executable).parent / "transformers")]
    if with_us:
        command = [sys.executable, "-m", "liteboost_adaptor", "run", "--level", "2"]
        command = [*command, *(("--tp", str(ranks)) if ranks > 1 else ()), "transformers"]
    named = () if model is None else (str(model),)
    arguments = ["serve", *named, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    each = "-%p" if ranks > 1 else ""
    status_file, log = folder / f"status-{port}{each}.json", folder / f"server-{port}.log"
    if with_us:
        variables["LITEBOOST_STATUS_FILE"] = str(status_file)
    environment = processes.environment(HF_HUB_OFFLINE="1", **variables)
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [*command, *arguments, *options], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    found = Server(process, str(model), port, log, status_file)
    try:
        _wait_until_it_answers(found)
        yield found
    finally:
        if process.poll() is None:
            # Of a launcher, ranks would live on.
            for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                each.kill()
            process.wait()


def _wait_until_it_answers(server: Server) -> None:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and server.process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=10):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"the server does not answer:\n{server.log.read_text()[-4000:]}")
