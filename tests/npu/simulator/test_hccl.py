"""Collectives of torch.distributed over the simulator's libhccl, two ranks."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "hccl_program.py"


def test_two_ranks_agree() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += [f"--master-port={port}", str(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank")) == [
        "rank 0 ok",
        "rank 1 ok",
    ]
