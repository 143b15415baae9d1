"""Ranks that do something else than the others: all end with the reason, or go on with the right text."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from parallel import ranks
from parallel.test_loading import save

pytestmark = pytest.mark.usefixtures("native_only")


class Kind(NamedTuple):
    """``who`` is the number of a rank, -1 the last; the others are as in `jobs_kinds`."""

    who: int
    where: str
    what: str


KINDS = (
    *(Kind(-1, "start", what) for what in ("skip", "exit", "kill", "stop")),
    *(Kind(-1, "load", what) for what in ("raise", "exit", "kill", "stop", "inputs")),
    *(Kind(-1, "between", what) for what in ("skip", "exit", "kill", "stop")),
    *(Kind(-1, "prompt", what) for what in ("raise", "exit", "kill", "stop", "inputs", "settings")),
    *(Kind(-1, "decode", what) for what in ("raise", "exit", "kill", "stop", "inputs", "ends")),
    *(Kind(-1, "loop", what) for what in ("raise", "exit", "kill", "stop")),
    *(Kind(-1, "save", what) for what in ("raise", "exit", "kill", "stop", "skip")),
    # Rank 0 serves what the others meet by, unless a launcher does.
    *(Kind(0, "start", what) for what in ("skip", "exit")),
    Kind(0, "load", "kill"),
    Kind(0, "between", "exit"),
    *(Kind(0, "prompt", what) for what in ("kill", "stop")),
    *(Kind(0, "decode", what) for what in ("raise", "stop")),
    Kind(0, "save", "kill"),
)
#: Of those, in the first tier.
FIRST = (
    Kind(-1, "start", "exit"),
    Kind(-1, "between", "skip"),
    Kind(-1, "prompt", "inputs"),
    Kind(-1, "decode", "raise"),
    Kind(-1, "decode", "inputs"),
    Kind(-1, "decode", "stop"),
    Kind(0, "prompt", "stop"),
    Kind(-1, "save", "skip"),
)
#: Reasons name a rank, or what rank 0 has served.
_REASON = re.compile(r"ranks? \d|the store by which the ranks find each other|different")


def of(kind: Kind, size: int, folder: Path, wait: float, **variables: str) -> list[ranks.Rank]:
    who = kind.who % size
    target = folder / f"{who}-{kind.where}-{kind.what}-{size}"
    job = "parallel.jobs_kinds:scenario"
    return ranks.start(size, job, str(folder), str(target), who, kind.where, kind.what, wait, **variables)


def ended(kind: Kind, started: list[ranks.Rank]) -> list[tuple[int | None, str]]:
    """As `ranks.finish`; who was stopped, and never ends, is killed when the others have ended."""
    who = kind.who % len(started)
    others = ranks.finish([each for rank, each in enumerate(started) if rank != who], timeout=150)
    if kind.what == "stop":
        started[who].process.kill()
    done = ranks.finish([started[who]], timeout=60)
    return [*others[:who], *done, *others[who:]]


def check(kind: Kind, done: list[tuple[int | None, str]], expected: dict[str, Any], is_timed: bool) -> str:
    """Every rank that could ended by itself, with the right text or a reason; returns what became of it."""
    who, said = kind.who % len(done), []
    gone = kind.what in ("exit", "kill", "stop")
    for rank, (code, text) in enumerate(done):
        if rank == who and gone:
            continue
        assert code == 0, (kind, rank, code, text[-3000:])
        for outcome in ranks.result(text)["outcomes"]:
            assert not is_timed or outcome["seconds"] < 30, (kind, rank, outcome)
            if "error" in outcome:
                assert outcome["error"].startswith("ParallelError"), (kind, rank, outcome)
                assert _REASON.search(outcome["error"]), (kind, rank, outcome)
            elif "planted" in outcome:
                assert rank == who
            elif outcome["value"] is not None:
                assert outcome["value"] == _right(kind, rank == who, outcome["call"], expected), (kind, rank)
            said.append(
                f"{outcome['call']}: {outcome.get('error', 'planted' if 'planted' in outcome else 'right')}"
            )
    return "; ".join(dict.fromkeys(each[:160] for each in said))


def _right(kind: Kind, is_other: bool, call: str, expected: dict[str, Any]) -> list[int]:
    if kind == Kind(kind.who, "load", "inputs") and is_other:
        return expected["of the other model"]
    if not is_other or call == "second":
        return expected["tokens"]
    names = {"inputs": "others" if kind.where == "prompt" else "rolled", "settings": "short", "ends": "ended"}
    return expected[names.get(kind.what, "tokens")]


def _expected(folder: Path) -> dict[str, Any]:
    save(folder, ("llama", "qwen3"))
    (folder / "qwen3").rename(folder / "other")
    started = [
        ranks.start(1, "parallel.jobs_kinds:reference", str(folder / name), WORLD_SIZE="1", LITEBOOST_TP="1")
        for name in ("llama", "other")
    ]
    found, other = (ranks.result(ranks.finish(each)[0][1]) for each in started)
    return {**found, "of the other model": other["tokens"]}


def _segments() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("liteboost-")}


def test_ranks_that_do_something_else(tmp_path: Path) -> None:
    expected, before = _expected(tmp_path), _segments()
    found = {}
    for first in range(0, len(FIRST), 4):
        started = {kind: of(kind, 2, tmp_path, 3.0) for kind in FIRST[first : first + 4]}
        found |= {kind: check(kind, ended(kind, each), expected, False) for kind, each in started.items()}
    assert _segments() <= before
    # A script that works by itself works: where ranks differ before a call, no rank fails.
    for kind in (
        kind for kind in FIRST if kind.where in ("start", "between") or kind[1:] == ("prompt", "inputs")
    ):
        assert "Error" not in found[kind], (kind, found[kind])
    assert "left the call that all ranks are in, by Planted: planted" in found[Kind(-1, "decode", "raise")]
    assert "second: right" in found[Kind(-1, "decode", "raise")]
    assert "works on other tokens" in found[Kind(-1, "decode", "inputs")]
    assert "has been stopped" in found[Kind(-1, "decode", "stop")]


@contextlib.contextmanager
def _agent() -> Any:
    """What torchrun sets: a store that outlives the ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    del store


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["any", "torchrun"])
@pytest.mark.parametrize("size", [2, 4])
def test_every_kind(tmp_path: Path, size: int, launcher: str) -> None:
    expected, before = _expected(tmp_path), _segments()
    lines = []
    for kind in KINDS:
        with _agent() if launcher == "torchrun" else contextlib.nullcontext({}) as variables:
            start = time.monotonic()
            said = check(kind, ended(kind, of(kind, size, tmp_path, 0.0, **variables)), expected, True)
            lines.append(f"{kind.who} {kind.where} {kind.what} {time.monotonic() - start:.0f} s | {said}")
    (tmp_path / "table").write_text("\n".join(lines) + "\n")
    assert _segments() <= before
