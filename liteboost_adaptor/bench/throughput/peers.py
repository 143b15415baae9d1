"""Engines that are not ours, asked as the workers of a benchmark are."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from ..processes import Asked, Worker, WorkerError
from ..settings import Settings
from . import vllm_worker

#: The engine in the very process that is asked, and gigabytes of its cache.
_VLLM_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_NO_USAGE_STATS": "1",
}


def started(
    peers: Mapping[str, Sequence[str]],
    settings: Settings,
    folder: Path,
    most_requests: int,
    scratch: Path,
    stack: ExitStack,
) -> dict[str, Asked]:
    """The ``peers``, names and commands, ready for rounds until ``stack`` is closed.

    Args:
        folder: A model with its configuration, for vLLM.
        most_requests: Of a round.
        scratch: For logs.

    Raises:
        WorkerError: vLLM does not start.
    """
    found: dict[str, Asked] = {}
    for name, command in peers.items():
        if name == "llama.cpp":
            found[name] = Llama(command, settings, most_requests)
            continue
        options = {
            "model": str(folder),
            "dtype": settings.dtype,
            "prompt": settings.prompt,
            "new": settings.new,
            "most_requests": most_requests,
        }
        variables = {**_VLLM_VARIABLES, "VLLM_CPU_OMP_THREADS_BIND": f"0-{settings.threads - 1}"}
        program = (*command, vllm_worker.__file__)
        worker = Worker(name, settings.threads, scratch, variables=variables, program=program)
        stack.enter_context(closing(worker))
        worker.ask("load", options=options)
        found[name] = worker
    return found


class Llama:
    """``llama-batched-bench``: a process for each round, which loads the model before it takes the time."""

    def __init__(self, command: Sequence[str], settings: Settings, most_requests: int) -> None:
        """
        Args:
            command: The program and its model.
            settings: Tokens of prompt and text, and threads.
            most_requests: Of a round: its cache is as large in each.
        """
        options = {
            "-npp": settings.prompt,
            "-ntg": settings.new,
            "-t": settings.threads,
            "-tb": settings.threads,
            "-c": most_requests * (settings.prompt + settings.new),
            "--output-format": "jsonl",
        }
        self._command = [*command, *(str(part) for option in options.items() for part in option)]
        self._peak_kib = 0

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """``batch`` with ``requests`` gives the seconds of prompts and texts, ``finish`` the peak memory.

        Raises:
            WorkerError: It failed.
        """
        if do == "finish":
            return {"peak_rss_mb": self._peak_kib / 1024, "status": None}
        return {"seconds": self._seconds(arguments["requests"])}

    def _seconds(self, requests: int) -> float:
        command = [*self._command, "-npl", str(requests)]
        with (
            TemporaryFile() as log,
            subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process,
        ):
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            self._peak_kib = max(self._peak_kib, usage.ru_maxrss)
            log.seek(0)
            text = log.read().decode(errors="replace")
        for line in text.splitlines():
            if line.startswith("{"):
                found = json.loads(line)
                if found.get("pl") == requests:
                    return found["t_pp"] + found["t_tg"]
        raise WorkerError(
            f"{' '.join(command)} gave no figures and ended with {process.returncode}. It last printed:\n"
            + "\n".join(text.splitlines()[-20:])
        )
