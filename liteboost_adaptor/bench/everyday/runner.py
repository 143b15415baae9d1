"""Hands every script to the variants in turn, and compares what they give and what they cost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from ... import config
from ...errors import LiteBoostError
from . import worker
from .models import folder_of
from .scripts import SCRIPTS

#: How far results may lie apart, relative to the largest: tokens have to be the same.
TOLERANCE = 1e-3
#: The bars: no script may cost more, and most should cost less.
NEVER_OVER, AT_MOST = 1.03, 0.7


class ScriptError(LiteBoostError, RuntimeError):
    """A script failed, or gave other results than without us."""


@dataclass(frozen=True)
class Row:
    """One script, medians over the rounds.

    Attributes:
        name: Which.
        words: What it does.
        plain_s: Processor time without us, in seconds.
        ours_s: The same at the level.
        ratio: Of the second to the first.
    """

    name: str
    words: str
    plain_s: float
    ours_s: float
    ratio: float


class _Variant:
    """The process of one variant, and the pipe to it."""

    def __init__(self, level: str | None, threads: int) -> None:
        environment = config.child_environment(
            LITEBOOST_LEVEL=level,
            OMP_NUM_THREADS=str(threads),
            MKL_NUM_THREADS=str(threads),
            # Threads that spin while they wait cost processor time by what else the machine does.
            OMP_WAIT_POLICY="passive",
            HF_HUB_OFFLINE="1",
            TOKENIZERS_PARALLELISM="false",
        )
        self._name = "without us" if level is None else f"at level {level}"
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                worker.__file__,
                *([] if level is None else ["liteboost_adaptor"]),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def __enter__(self) -> _Variant:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def run(self, name: str, folder: Path) -> dict[str, Any]:
        """What `worker` answers.

        Raises:
            ScriptError: The script raised, or its process ended.
        """
        self._process.stdin.write(json.dumps([name, str(folder)]) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline() or '{"error": "it ended"}')
        if "error" in answer:
            raise ScriptError(f"the script {name!r} {self._name}: {answer['error']}")
        return answer


def measure(
    names: Sequence[str], workdir: Path, rounds: int, threads: int, level: str = "2"
) -> Iterator[Row]:
    """The scripts ``names``, one after the other.

    Raises:
        ScriptError: A script failed, or gave other results than without us.
    """
    with _Variant(None, threads) as plain, _Variant(level, threads) as ours:
        for name in names:
            folder = folder_of(SCRIPTS[name].model, workdir)
            answers = [(plain.run(name, folder), ours.run(name, folder)) for _ in range(rounds)]
            for each in answers:
                _compare(name, *(found["numbers"] for found in each))
            first, second = (median(each[at]["cpu_s"] for each in answers) for at in (0, 1))
            yield Row(name, SCRIPTS[name].words, first, second, second / first)


def _compare(name: str, expected: list[float], found: list[float]) -> None:
    largest = max(map(abs, expected), default=0.0)
    pairs = zip(expected, found, strict=False)
    if len(expected) != len(found) or any(abs(a - b) > TOLERANCE * min(largest, 1.0) for a, b in pairs):
        raise ScriptError(f"the script {name!r} gives other results at the level than without us")


def table(rows: Iterable[Row]) -> Iterator[str]:
    """Markdown, a row for each script."""
    yield "| script | | without us, s | at level 2, s | times |\n"
    yield "| --- | --- | ---: | ---: | ---: |\n"
    for row in rows:
        yield f"| {row.name} | {row.words} | {row.plain_s:.2f} | {row.ours_s:.2f} | {row.ratio:.2f} |\n"
