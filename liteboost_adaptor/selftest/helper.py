"""A helper process that compares ops on a device: what an operator does there is not done to this process.

An operator that ends with an exception stops the streams of its process, and none of its calls succeeds any
more; one that never ends is never waited for any more, either. So they run first in a process that can be
given up. It is started when it is first asked, serves one comparison after the other, and ends when nobody
has asked it for a while, for a context takes memory of the device. `helper_main` is the other side.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Pipe
from typing import Any

import torch

from .. import config
from ..errors import LiteBoostError
from . import facts
from .compare import Result

#: Seconds that it may take to start, and to compare one kind. Both take seconds; a machine may be busy.
START_SECONDS = 300.0
KIND_SECONDS = 300.0
#: Seconds until it is killed that is to end.
GRACE_SECONDS = 5.0
#: What the helper runs: it finds what this process finds, and nothing of the user's program.
ENTRY = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from liteboost_adaptor.selftest.helper_main import main; main(int(sys.argv[2]), sys.argv[3])"
)
#: What makes a process one of several, which the helper is not.
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class HelperError(LiteBoostError, RuntimeError):
    """No comparison can be made in a helper process, whatever the op."""


class _Ended(Exception):
    """The helper is gone; says how."""


def compare(op: str, kind: str, device: str) -> Result:
    """`compare.compare` in the helper process of this process.

    Args:
        op: Name without namespace.
        kind: As in `selftest.case.cases_of`.
        device: ``"npu:0"`` and on.

    Returns:
        As of `compare.compare`. Where the helper lost the device, ended or did not come to an end, that is
        the result's ``fault``, and the next comparison gets another helper.

    Raises:
        HelperError: No helper can be started.
        torch.OutOfMemoryError: The device has no memory left; nothing is said about the op.
        RuntimeError: The comparison raised, in its words.
    """
    with _lock:
        return _helper_on(device).compare(op, kind)


def started() -> int:
    """How many helpers this process has started."""
    return len(_START_SECONDS)


def start_seconds() -> float:
    """What starting them took."""
    return sum(_START_SECONDS)


def process_on(device: str) -> subprocess.Popen[bytes]:
    """The helper on a device, which has been asked."""
    return _helpers[device].process


def close() -> None:
    """End every helper; the next comparison starts another."""
    with _lock:
        while _helpers:
            _helpers.popitem()[1].close()
        _failed.clear()


_lock = threading.Lock()
_helpers: dict[str, _Helper] = {}
_START_SECONDS: list[float] = []
_failed: dict[str, str] = {}  # why none can be started on a device: that is tried once


def _helper_on(device: str) -> _Helper:
    if device in _failed:
        raise HelperError(_failed[device])
    if device not in _helpers or not _helpers[device].is_alive():
        if device in _helpers:
            _helpers.pop(device).close()
        before = time.perf_counter()
        try:
            _helpers[device] = _Helper(device)
        except (OSError, _Ended) as fault:
            _failed[device] = (
                f"no helper process could be started on {device} to compare it in: {fault}. Set "
                "LITEBOOST_FIRST_USE=thread to compare in the process itself, or run `python -m "
                "liteboost_adaptor selftest --device npu` once while the device has memory left"
            )
            raise HelperError(_failed[device]) from None
        _START_SECONDS.append(time.perf_counter() - before)
    return _helpers[device]


class _Helper:
    """One helper process and the pipe to it."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._owner = os.getpid()
        self._connection, theirs = Pipe()
        self._log = tempfile.TemporaryFile()
        try:
            self.process = subprocess.Popen(
                [str(sys.executable), "-c", ENTRY, json.dumps(sys.path), str(theirs.fileno()), device],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=config.child_environment(LITEBOOST_FIRST_USE="thread", **dict.fromkeys(LAUNCHER)),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # an interrupt from the terminal is for this process
            )
        finally:
            theirs.close()
        atexit.register(self.close)
        try:
            answer, what = self._receive(START_SECONDS)
        except _Ended:
            self.close()
            raise
        if answer != "ready" or what != facts.identity():
            self.close()
            raise _Ended(what if answer == "raised" else f"it found another installation: {what}")

    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return not self._connection.closed and self.process.poll() is None

    def compare(self, op: str, kind: str) -> Result:
        try:
            self._send((op, kind))
            answer, what = self._receive(KIND_SECONDS)
            if answer == "idle":  # it ended as it was asked
                self.close()
                return _helper_on(self._device).compare(op, kind)
        except _Ended as end:
            self.close()
            return Result(op, kind, (), fault=f"the helper process that compared it {end} ({kind})")
        if answer == "memory":
            raise torch.OutOfMemoryError(what)
        if answer == "raised":
            raise RuntimeError(what)
        result: Result = what
        if result.fault:
            self.close()
        return result

    def close(self) -> None:
        """End it: it ends itself when the pipe is closed, unless it hangs."""
        if os.getpid() != self._owner:  # forked: it is not ours
            return
        atexit.unregister(self.close)
        self._connection.close()
        self._status()
        self._log.close()

    def _status(self) -> int:
        """Of its end; killed where it does not end by itself, now that nobody asks it any more."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(GRACE_SECONDS)
        self.process.kill()
        return self.process.wait()

    def _send(self, request: Any) -> None:
        with contextlib.suppress(OSError):  # the missing answer says more
            self._connection.send(request)

    def _receive(self, seconds: float) -> tuple[str, Any]:
        try:
            if self._connection.poll(seconds):
                answer: tuple[str, Any] = self._connection.recv()
                return answer
        except (EOFError, OSError):
            raise _Ended(f"ended with status {self._status()}{self._last_words()}") from None
        raise _Ended(f"did not come to an end within {seconds:.0f} s")

    def _last_words(self) -> str:
        self._log.seek(max(os.fstat(self._log.fileno()).st_size - 2000, 0))
        lines = self._log.read().decode(errors="replace").split("\n")
        last = " ".join(next((line for line in reversed(lines) if line.strip()), "").split())
        return f": {last}" if last else ""
