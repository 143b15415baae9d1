"""Python programs of their own, for tests of variables that are read once or of a process that ends."""

from __future__ import annotations

import re
import subprocess
import sys


def start(code: str, variables: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs Python code on the simulator; ``variables`` is its whole environment (the present one)."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What it printed, without what torch_npu prints when it is imported."""
    lines = done.stdout.splitlines()
    return [line for line in lines if not re.match("Warning ?: ASCEND_HOME_PATH", line)]  # as 2.9.0 spells it


def output(code: str, variables: dict[str, str] | None = None) -> list[str]:
    """The lines printed by code that must succeed."""
    done = start(code, variables)
    assert done.returncode == 0, done.stderr[-4000:]
    return lines(done)
