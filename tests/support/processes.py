"""Fresh Python processes that see this package and the test helpers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import liteboost_adaptor
from support import forked

TESTS = Path(__file__).resolve().parents[1]
PACKAGE_PARENT = Path(liteboost_adaptor.__file__).resolve().parents[1]


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without ``LITEBOOST_*``, with ``changes``, on one thread."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LITEBOOST_")}
    path = os.pathsep.join([str(TESTS), str(PACKAGE_PARENT), kept.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **changes}


def python(
    script: str, *arguments: str, timeout: float = 240, is_forked: bool = False, **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` with the variables in ``changes``; nothing is raised on failure.

    Args:
        is_forked: The process has imported torch and transformers before, which saves most of its time. Not
            for what depends on that order, or on variables that these two read as they are imported.
    """
    if is_forked:
        return forked.python(script, *arguments, environment=environment(**changes), timeout=timeout)
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(
        command, env=environment(**changes), capture_output=True, text=True, timeout=timeout, check=False
    )


def python_json(script: str, *arguments: str, **changes: Any) -> Any:
    """The last line that ``script`` prints, as JSON; fails with its error output when it fails."""
    done = python(script, *arguments, **changes)
    if done.returncode:
        raise AssertionError(f"exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
