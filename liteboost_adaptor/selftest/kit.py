"""The full report on an NPU: every operator and kind, then what is made of them, in order of risk.

Each stage is a process of its own: one that crashes, hangs or loses its device takes no other with it.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import config
from . import helper
from .families import FAMILIES
from .report import Progress

#: Seconds that a stage may take.
STAGE_SECONDS = 900.0
ENTRY = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import liteboost_adaptor; "
    "from liteboost_adaptor.selftest.stages import main; main(*sys.argv[2:])"
)
RANKS = 2
STAGES = (
    *("capture", "collectives"),
    *(f"family {family}" for family in FAMILIES),
    *("launches", "timed_step"),
)


@dataclass(frozen=True)
class Stage:
    """What a stage found.

    Attributes:
        name: Of `STAGES`.
        outcome: ``"pass"``, ``"FAIL"`` or ``"skipped"``.
        words: Figures, or what was wrong.
        seconds: What it took, with the start of its process.
    """

    name: str
    outcome: str
    words: str
    seconds: float


def run(
    device: str, names: tuple[str, ...] = STAGES, progress: Progress = lambda done, total, what: None
) -> Iterator[Stage]:
    """Run stages one after the other.

    Args:
        device: ``"npu:0"`` and on.
        names: Of `STAGES`.
        progress: Told of every stage.
    """
    for done, name in enumerate(names):
        progress(done, len(names), name)
        before = time.perf_counter()
        count = RANKS if name == "collectives" else 1
        if count > torch.npu.device_count():
            yield Stage(name, "skipped", f"needs {count} NPUs, found {torch.npu.device_count()}", 0.0)
            continue
        outcome, words = _outcome(name, device, count)
        yield Stage(name, outcome, words, time.perf_counter() - before)


def _outcome(name: str, device: str, count: int) -> tuple[str, str]:
    """Outcome and words of a stage in ``count`` processes; those of the first one that is not right."""
    with tempfile.TemporaryDirectory() as folder:
        started = [_Process(name, device, rank, count, Path(folder)) for rank in range(count)]
        latest = time.monotonic() + STAGE_SECONDS
        found = [process.outcome(latest) for process in started]
    return next((each for each in found if each[0] != "pass"), found[0])


class _Process:
    """One rank of a stage."""

    _port = 0

    def __init__(self, name: str, device: str, rank: int, count: int, folder: Path) -> None:
        self._file, self._log = folder / f"{rank}.json", folder / f"{rank}.log"
        variables: dict[str, str | None] = dict.fromkeys(helper.LAUNCHER)
        if count > 1:
            if rank == 0:
                _Process._port = _free_port()
            device = f"npu:{rank}"
            variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_Process._port)}
            variables |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count))
            variables |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(sys.executable), "-c", ENTRY, json.dumps(sys.path), name, device, str(self._file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=config.child_environment(LITEBOOST_LEVEL="0", HF_HUB_OFFLINE="1", **variables),
            )

    def outcome(self, latest: float) -> tuple[str, str]:
        """``"pass"`` or ``"FAIL"``, and the words; waits until ``latest`` of the monotonic clock."""
        try:
            status = self._process.wait(max(latest - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return "FAIL", f"did not come to an end within {STAGE_SECONDS:.0f} s"
        if self._file.is_file():  # also where the process has ended badly after it
            passed, words = json.loads(self._file.read_text(encoding="utf-8"))
            return ("pass" if passed else "FAIL"), words
        log = self._log.read_text(errors="replace")
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        return "FAIL", f"ended with status {status}: {' / '.join(lines[-4:])}"


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def text(stages: list[Stage]) -> str:
    """The stages in Markdown."""
    lines = ["", "## Stages", "", "| stage | outcome | seconds | figures or fault |", "|---|---|---:|---|"]
    for each in stages:
        words = each.words.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {each.name} | {each.outcome} | {each.seconds:.1f} | {words} |")
    failed = [each.name for each in stages if each.outcome == "FAIL"]
    lines += [
        "",
        f"Stages that fail: {', '.join(failed) or 'none'}. Paste this file, whole, into an issue; where a "
        "stage failed, add the newest plog of `~/ascend/log`.",
    ]
    return "\n".join(lines) + "\n"
