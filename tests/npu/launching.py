"""Programs of tests under ``torchrun``, a simulated NPU a rank."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_ranks(ranks: int, program: str, task: Any, folder: Path, **changes: str) -> list[Any]:
    """What each rank of ``program``, a file beside this one, has written to ``<first argument>.<rank>``.

    Args:
        task: Written to the file that the first argument names.
        changes: Of the environment.
    """
    file = folder / "task"
    file.write_text(json.dumps(task))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, f"--master-port={port}", str(Path(__file__).parent / program), str(file)],
        env=os.environ | changes | {"SIMCANN_DEVICES": str(ranks), "LITEBOOST_LEVEL": "2"},
        capture_output=True,
        text=True,
        check=False,
        timeout=3600,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return [json.loads(Path(f"{file}.{rank}").read_text()) for rank in range(ranks)]
