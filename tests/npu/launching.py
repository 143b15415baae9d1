"""Programs of tests on the simulator: of other SoCs and releases, and under ``torchrun``, an NPU a rank."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any


def simulated(*command: str | Path, timeout: float = 600, **changes: str) -> list[str]:
    """The lines that ``python -m cann_sim run`` prints, which must succeed.

    Args:
        command: Its options, the program and what the program is given.
        changes: Of the environment.
    """
    return _lines([sys.executable, "-m", "cann_sim", "run", *command], timeout, changes)


def torchrun(ranks: int, program: Path, *arguments: str | Path, timeout: float, **changes: str) -> list[str]:
    """The lines that the ranks of ``program`` print, which must succeed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    return _lines([*command, f"--master-port={port}", program, *arguments], timeout, changes)


def run_ranks(ranks: int, program: str, task: Any, folder: Path, **changes: str) -> list[Any]:
    """What each rank of ``program``, a file beside this one, has written to ``<first argument>.<rank>``.

    Args:
        task: Written to the file that the first argument names.
        changes: Of the environment.
    """
    file = folder / "task"
    file.write_text(json.dumps(task))
    changes |= {"SIMCANN_DEVICES": str(ranks), "LITEBOOST_LEVEL": "2"}
    torchrun(ranks, Path(__file__).parent / program, file, timeout=3600, **changes)
    return [json.loads(Path(f"{file}.{rank}").read_text()) for rank in range(ranks)]


def _lines(command: list[str | Path], timeout: float, changes: dict[str, str]) -> list[str]:
    done = subprocess.run(
        command, env=os.environ | changes, capture_output=True, text=True, check=False, timeout=timeout
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout.splitlines()
