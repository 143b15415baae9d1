"""Programs of tests on the simulator: of other SoCs and releases, and under ``torchrun``, an NPU a rank."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

Launch = Callable[..., list[str]]


def simulated(*command: str | Path, timeout: float = 600, **changes: str) -> list[str]:
    """The lines that ``python -m cann_sim run`` prints, which must succeed.

    Args:
        command: Its options, the program and what the program is given.
        changes: Of the environment.
    """
    return _lines([sys.executable, "-m", "cann_sim", "run", *command], timeout, changes)


def torchrun(ranks: int, program: Path, *arguments: str | Path, timeout: float, **changes: str) -> list[str]:
    """The lines that the ranks of ``program`` print, which must succeed."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    return _lines([*command, f"--master-port={_free_port()}", program, *arguments], timeout, changes)


def without_torchrun(
    ranks: int, program: Path, *arguments: str | Path, timeout: float, **changes: str
) -> list[str]:
    """The same, in the variables that torchrun sets and without its own process, which imports torch, too."""
    changes |= {name: str(ranks) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    changes |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        printed = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        started = []
        for rank, file in enumerate(printed):
            own = os.environ | changes | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-W", "ignore", program, *arguments]
            started.append(subprocess.Popen(command, env=own, stdout=file, stderr=subprocess.STDOUT))
            stack.callback(started[-1].kill)
        end = time.monotonic() + timeout
        while any(each.poll() is None for each in started):
            if any(each.poll() for each in started) or time.monotonic() > end:
                break  # the others would wait for it
            time.sleep(0.05)
        texts = []
        for file in printed:
            file.seek(0)
            texts.append(file.read())
        assert all(each.poll() == 0 for each in started), "\n".join(text[-3000:] for text in texts)
    return "".join(texts).splitlines()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def run_ranks(
    ranks: int, program: str, task: Any, folder: Path, launch: Launch = without_torchrun, **changes: str
) -> list[Any]:
    """What each rank of ``program``, a file beside this one, has written to ``<first argument>.<rank>``.

    Args:
        task: Written to the file that the first argument names.
        launch: `torchrun` or `without_torchrun`.
        changes: Of the environment.
    """
    file = folder / "task"
    file.write_text(json.dumps(task))
    changes |= {"SIMCANN_DEVICES": str(ranks), "LITEBOOST_LEVEL": "2"}
    launch(ranks, Path(__file__).parent / program, file, timeout=3600, **changes)
    return [json.loads(Path(f"{file}.{rank}").read_text()) for rank in range(ranks)]


def _lines(command: list[str | Path], timeout: float, changes: dict[str, str]) -> list[str]:
    done = subprocess.run(
        command, env=os.environ | changes, capture_output=True, text=True, check=False, timeout=timeout
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout.splitlines()
