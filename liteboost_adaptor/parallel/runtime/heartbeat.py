"""Liveness of ranks: heartbeats in a store that all ranks share, and a monitor that reads them.

Every rank publishes, twice a second and whenever it changes, whether it is at work in a call that the ranks
make together, which calls it has come to, and which it has left by an exception. From that, a rank that waits
for another can tell a slow one from one that will not come.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ... import config
from ...errors import ParallelError
from . import host_processes

#: Between heartbeats of a rank.
HEARTBEAT_INTERVAL_S = 0.5
_STOPPED = "has been stopped"
#: Longer gaps between checks do not count as waiting: this process was stopped, maybe together with others.
_MAX_POLL_GAP_S = 1.0


@dataclass
class Timeouts:
    """How long to wait for ranks, in seconds.

    Attributes:
        start: At the first load, when processes start one after the other.
        absent: For one that is not at work: it has left the call, was stopped, or is silent.
        ahead: For one that has gone on to a later call.
    """

    start: float = 15.0
    absent: float = 15.0
    ahead: float = 3.0


timeouts = Timeouts()
#: For a rank that is alive and at work.
COLLECTIVE_TIMEOUT_S = 600.0


class StoreUnavailable(ParallelError):
    """The process that serves the store has ended or was stopped."""


@dataclass
class _StoreState:
    """What the connections of a process have in common.

    Attributes:
        gone: Why the store does not answer any more; empty while it does.
    """

    gone: str = ""


class _StoreThread(threading.Thread):
    """Runs requests to the store in order, so that a caller can time out while a request blocks."""

    def __init__(self, service: _StoreState) -> None:
        super().__init__(name="liteboost-store", daemon=True)
        self.service = service
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], list[Any], threading.Event]]
        self._asked = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            action, result, is_done = self._asked.get()
            try:
                result.append((action(), None))
            except BaseException as fault:  # noqa: BLE001 - raised in the caller
                result.append((None, fault))
            is_done.set()

    def ask(self, action: Callable[[], Any]) -> Any:
        """``action()``.

        Raises:
            StoreUnavailable: It failed, or took too long.
        """
        if self.service.gone:
            raise StoreUnavailable(self.service.gone)
        result: list[Any] = []
        is_done = threading.Event()
        self._asked.put((action, result, is_done))
        left = timeouts.absent
        while (
            not is_done.wait(HEARTBEAT_INTERVAL_S) and left > 0 and not self.service.gone
        ):  # time in which this process was stopped does not count
            left -= HEARTBEAT_INTERVAL_S
        value, fault = result[0] if result else (None, f"no answer for {timeouts.absent:.0f} s")
        if fault is None:
            return value
        self.service.gone = self.service.gone or (
            "the store by which the ranks find each other does not answer: the process that serves it, rank "
            "0 or the launcher, has ended or was stopped; its own output says why "
            f"({str(fault).partition(chr(10))[0]})"
        )
        raise StoreUnavailable(self.service.gone)


class SharedStore:
    """A key-value store of ``torch.distributed`` that all ranks share.

    Every method raises `StoreUnavailable` where it is not served any more.
    """

    def __init__(self, store: Any, service: _StoreState | None = None) -> None:
        self._store = store
        self._line = _StoreThread(service or _StoreState())

    def clone(self) -> SharedStore:
        """The same store by another connection, for another thread."""
        return SharedStore(self._line.ask(self._store.clone), self._line.service)

    def put(self, key: str, value: bytes) -> None:
        """Write ``value``."""
        self._line.ask(lambda: self._store.set(key, base64.b64encode(value).decode()))

    def has(self, key: str) -> bool:
        """Whether ``key`` exists."""
        return bool(self._line.ask(lambda: self._store.check([key])))

    def get(self, key: str) -> bytes | None:
        """The value of ``key``, or None."""
        found = self._line.ask(lambda: self._store.get(key) if self._store.check([key]) else None)
        return None if found is None else base64.b64decode(found)

    def settle(self, key: str, proposed: str) -> str:
        """The first value ever ``proposed`` for ``key``: the same on every rank."""
        return bytes(self._line.ask(lambda: self._store.compare_set(key, "", proposed))).decode()

    def remove(self, key: str) -> None:
        """Delete ``key``, if the store supports that."""
        with contextlib.suppress(StoreUnavailable):
            self._line.ask(lambda: _removed(self._store, key))


def _removed(store: Any, key: str) -> None:
    with contextlib.suppress(RuntimeError, NotImplementedError):
        store.delete_key(key)


class Heartbeat:
    """Publishes this rank's state in the store, and reads that of the others.

    Attributes:
        depth: How many nested calls this rank is in.
        current: Group and number of the call it is in, or was in last.
    """

    def __init__(self, store: SharedStore, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.lock = threading.RLock()
        self.depth = 0
        self.current = ("", "")
        self._beat = 0
        self._calls: dict[str, str] = {}
        self._left: dict[str, tuple[str, str]] = {}
        self._has_ended = False
        self._self = (host_processes.host(), os.getpid())
        self.publish()

    def publish(self, store: SharedStore | None = None) -> None:
        """Publish the state of this rank."""
        with self.lock:
            self._beat += 1
            state = {
                "beat": self._beat,
                "at_work": self.depth > 0,
                "calls": self._calls,
                "left": self._left,
                "ended": self._has_ended,
                "host": self._self[0],
                "process": self._self[1],
            }
            text = json.dumps(state)
        (store or self.store).put(f"heartbeat/{self.rank}", text.encode())

    def come_to(self, group: str, call: str) -> None:
        """Publish that this rank has come to ``call`` of ``group``."""
        with self.lock:
            self._calls[group] = call
        self.publish()

    def leave(self, group: str, call: str, reason: str) -> None:
        """Publish that this rank has left ``call`` of ``group`` by an exception."""
        with self.lock:
            self._left[group] = (call, reason)
        self.publish()

    def end(self) -> None:
        """Publish that this rank has ended."""
        self._has_ended = True
        with contextlib.suppress(ParallelError):
            self.publish()

    def state_of(self, rank: int, store: SharedStore | None = None) -> dict[str, Any] | None:
        """The last state that ``rank`` has published, or None."""
        found = (store or self.store).get(f"heartbeat/{rank}")
        return None if found is None else json.loads(found)


def left_call_reason(rank: int, why: str) -> str:
    """The message about a rank that has left a call by an exception, or about the rank that it waited for."""
    _, _, first = why.partition("waited for the others, and ")
    return first or f"rank {rank} has left the call that all ranks are in, by {why}"


class LivenessMonitor:
    """Decides whether ranks will still come to a call that this rank waits in.

    Args:
        group, call: The call.
        absent_s: How long a rank that is not at work may be absent.
        is_in_call: Whether they have been in the call already: one that is elsewhere has left it.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        group: str,
        call: str,
        absent_s: float,
        is_in_call: bool,
        store: SharedStore | None,
    ) -> None:
        self._heartbeat, self._group, self._call = heartbeat, group, call
        self._absent_s, self._is_in_call, self._store = absent_s, is_in_call, store
        self._absent: dict[int, float] = {}
        self._beats: dict[int, tuple[int, float]] = {}
        self._last = time.monotonic()

    def reason(self, ranks: Iterable[int]) -> str:
        """Why one of ``ranks`` will not come, or an empty string. Called repeatedly."""
        now = time.monotonic()
        passed, self._last = min(now - self._last, _MAX_POLL_GAP_S), now
        reasons = [self._reason(rank, passed) for rank in ranks]
        return next((each for each in reasons if each), "")

    def _reason(self, rank: int, passed: float) -> str:
        state = self._heartbeat.state_of(rank, self._store)
        if state is None:
            return self._absence(rank, passed, "has not been heard of", self._absent_s)
        name = f"rank {rank} (process {state['process']})"
        call, why = state["left"].get(self._group, ("", ""))
        if self._is_in_call and call == self._call:
            return left_call_reason(rank, why)
        if state["ended"]:
            return f"{name} has ended; its own output says why"
        process = host_processes.state(state["host"], state["process"])
        if process == host_processes.ENDED:
            return f"{name} has ended; its own output says why"
        if process == host_processes.STOPPED:
            return self._absence(rank, passed, _STOPPED, self._absent_s)
        if self._is_in_call and state["calls"].get(self._group) != self._call:
            return self._absence(rank, passed, "has gone on to something else", timeouts.ahead)
        if process == host_processes.UNKNOWN and self._is_silent(rank, state["beat"], passed):
            return f"{name}, on another host, has given no sign of life for {timeouts.absent:.0f} s"
        if state["at_work"]:
            self._absent.pop(rank, None)
            return ""
        what = "has left the call that it was in" if self._is_in_call else "has not come"
        return self._absence(rank, passed, what, self._absent_s)

    def _absence(self, rank: int, passed: float, what: str, limit: float) -> str:
        self._absent[rank] = self._absent.get(rank, 0.0) + passed
        if self._absent[rank] < limit:
            return ""
        if self._is_in_call:
            return f"rank {rank} {what}, and was waited for {limit:.0f} s"
        # Others that are absent too are named with it, even if they were noticed a moment later.
        away = sorted(each for each, spent in self._absent.items() if spent > limit / 2)
        named = f"rank {away[0]} has" if len(away) == 1 else f"ranks {', '.join(map(str, away))} have"
        stopped = " (it was stopped)" if what == _STOPPED else ""
        return f"{named} not come within {limit:.0f} s{stopped}"

    def _is_silent(self, rank: int, beat: int, passed: float) -> bool:
        last, silent = self._beats.get(rank, (-1, 0.0))
        self._beats[rank] = (beat, 0.0 if beat != last else silent + passed)
        return self._beats[rank][1] >= timeouts.absent


class _HeartbeatThread(threading.Thread):
    """Publishes the heartbeat, and calls functions that check waits outside of Python."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        super().__init__(name="liteboost-ranks", daemon=True)
        self.heartbeat = heartbeat
        self.callbacks: list[Any] = []
        self._is_over = threading.Event()

    def run(self) -> None:
        gone, store = "", None
        try:
            store = self.heartbeat.store.clone()
        except StoreUnavailable as fault:
            gone = str(fault)
        while not self._is_over.wait(HEARTBEAT_INTERVAL_S):
            try:
                if not gone:
                    self.heartbeat.publish(store)
                for callback in list(self.callbacks):
                    callback(store, gone)
            except StoreUnavailable as fault:
                gone = str(fault)

    def stop(self) -> None:
        """Called at the end of the process: nothing may use the store while it is torn down."""
        self._is_over.set()
        self.join(timeout=2 * HEARTBEAT_INTERVAL_S)
        self.heartbeat.end()


_open: dict[int, _HeartbeatThread] = {}
_lock = threading.Lock()


def process_heartbeat(open_store: Any) -> Heartbeat:
    """The heartbeat of this process; ``open_store()`` opens the store where none is open yet."""
    with _lock:
        watcher = _open.get(os.getpid())  # a fork is no rank, and has no thread
        if watcher is None:
            rank, size = ranks()
            watcher = _open[os.getpid()] = _HeartbeatThread(Heartbeat(open_store(), rank, size))
            watcher.start()
            atexit.register(watcher.stop)
        return watcher.heartbeat


def call_periodically(callback: Any) -> None:
    """Call ``callback(store, gone)`` twice a second, in a thread.

    ``gone`` says why the store is unavailable, or is empty.
    """
    _open[os.getpid()].callbacks.append(callback)


def ranks() -> tuple[int, int]:
    """Rank and world size of this process."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return config.launched() or (0, 1)
