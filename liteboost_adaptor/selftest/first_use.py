"""Whether an op may run on this NPU: compared at its first use, remembered in the user's cache directory.

An answer holds for one SoC, CANN, torch_npu and build of ours (`facts.identity`). Processes write files of
their own and move them into place, so nobody reads a part. Of processes that start together, one compares and
the others read its answer.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from .. import config
from . import facts, helper
from .compare import Result, compare

FOLDER = "first_use"
#: Seconds to wait for another process that compares.
TURN_SECONDS = helper.START_SECONDS + helper.KIND_SECONDS


def verdict(op: str, kind: str) -> str:
    """Why ``op`` may not run on tensors of this kind on the current NPU; empty when it may.

    Whatever goes wrong is a reason: an op that could not be compared is not used. Only what the comparison
    itself says is kept for later processes, that the device was lost in it, too; full memory, for example, is
    not.

    Args:
        op: Name without namespace.
        kind: Dtype and layout class, as `selftest.case.cases_of` takes it.
    """
    try:
        identity = facts.identity()
        path = _path(identity, op, kind)
        known = read(path, identity, op, kind)
        if known is not None:
            return known
        with _turn(path.parent):
            known = read(path, identity, op, kind)
            if known is not None:
                return known
            reason = compare_apart(op, kind).reason
            write(path, identity, op, kind, reason)
    except Exception as fault:  # noqa: BLE001  (counted as a fallback and listed in the status)
        words = " ".join(str(fault).split())
        return f"could not be compared with its reference ({kind}): {type(fault).__name__}: {words}"
    return reason


def remember(result: Result) -> None:
    """Keep what a comparison says for later processes on this machine, in place of what was kept before."""
    identity = facts.identity()
    write(_path(identity, result.op, result.kind), identity, result.op, result.kind, result.reason)


def read(path: Path, identity: dict[str, Any], op: str, kind: str) -> str | None:
    """The answer kept in ``path``; None where there is none, or what is there cannot be trusted."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        answer = {name: kept[name] for name in ("identity", "op", "kind", "reason")}
        if kept["checksum"] != _checksum(answer) or not isinstance(answer["reason"], str):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_ours = (answer["identity"], answer["op"], answer["kind"]) == (identity, op, kind)
    return answer["reason"] if is_ours else None


def write(path: Path, identity: dict[str, Any], op: str, kind: str, reason: str) -> None:
    """Keep an answer. Where nothing can be written, the next process compares again."""
    answer = {"identity": identity, "op": op, "kind": kind, "reason": reason}
    text = json.dumps({**answer, "checksum": _checksum(answer)}, indent=1) + "\n"
    unfinished = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()


def compare_apart(op: str, kind: str) -> Result:
    """Compare on the current NPU in the helper process, or (``LITEBOOST_FIRST_USE=thread``) in a thread.

    A thread has none of the caller's modes: inference mode, autocast, default device, function modes, the
    current stream and what a dispatcher in the middle of a call excludes all belong to one. Random numbers
    come from a generator of the cases' own.

    Raises:
        HelperError: No helper process can be started.
        torch.OutOfMemoryError: The device has no memory left.
    """
    device = f"npu:{torch.npu.current_device()}"
    if config.settings().first_use == "process":
        return helper.compare(op, kind, device)

    def run() -> Result:
        torch.npu.set_device(device)
        return compare(op, kind, device)

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="liteboost-first-use") as pool:
        return pool.submit(run).result()


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """One process at a time, of those that share the folder. Where no file can be locked, all at once."""
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / "lock").open("w"))
            latest = time.monotonic() + TURN_SECONDS
            while not _is_locked(file.fileno()) and time.monotonic() < latest:
                time.sleep(0.02)
        except OSError:
            pass  # whoever compares beside us writes the same answer
        yield


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _folder(identity: dict[str, Any]) -> Path:
    return config.user_cache_dir() / FOLDER / _checksum(identity)[:16]


def _path(identity: dict[str, Any], op: str, kind: str) -> Path:
    return _folder(identity) / f"{op} {kind}.json".replace(" ", "-").replace(os.sep, "_")


def _checksum(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
