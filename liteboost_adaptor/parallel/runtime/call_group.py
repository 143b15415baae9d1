"""Ranks that make the same calls: how they synchronize before one, what they exchange in it, how it ends.

Calls of a group are numbered. Before each, every rank publishes what it is about to do and waits for the
others. Whether they do it together is decided once, for all (`SharedStore.settle`), so ranks that come late
and ranks that no longer wait for them decide alike.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import ParallelError
from .heartbeat import Heartbeat, LivenessMonitor, SharedStore, StoreUnavailable, left_call_reason, timeouts

#: Shortest and longest interval between polls of the store.
_POLL_INTERVALS_S = (0.0002, 0.02)
#: Between checks of who is alive.
_LIVENESS_INTERVAL_S = 0.2
#: Longest value in the store; longer ones are split.
_CHUNK_BYTES = 2 << 20
_FROM_COLLECTIVE = re.compile(r"rank \d+ .*collective|waited for the others")
#: What gloo says, by which ranks of different hosts communicate: the place in its sources.
_FROM_GLOO = re.compile(r"/gloo/")


class RanksDiverged(Exception):
    """The ranks work independently from now on; says why."""


class PeerUnavailable(ParallelError):
    """A rank did not come. The others wait for the same one, and find out by themselves."""


class CallGroup:
    """A group of ranks that make the same calls, as one of them sees it.

    Attributes:
        call: Number of the current call, or of the last one.
        needs_sync: Whether this rank has left a call by an exception; the others may be elsewhere.
        groups: The process groups of ``torch.distributed`` used in its calls: name -> ranks.
        broken: Those with a collective that was started and never finished.
        start_timeout_s: How long to wait for ranks that are not in a call yet.
    """

    def __init__(self, heartbeat: Heartbeat, name: str, members: list[int]) -> None:
        self.heartbeat, self.name, self.members = heartbeat, name, members
        self.call = 0
        self.needs_sync = False
        self.groups: dict[str, list[int]] = {}
        self.broken: set[str] = set()
        self.start_timeout_s = timeouts.start
        self._step = 0
        self._lock = threading.RLock()
        self._monitors: dict[str, LivenessMonitor] = {}

    @property
    def _others(self) -> list[int]:
        return [rank for rank in self.members if rank != self.heartbeat.rank]

    def synchronize(
        self,
        facts: dict[str, Any],
        why_diverged: Callable[[dict[int, dict[str, Any]]], str],
        absent_s: float | None = None,
    ) -> dict[int, dict[str, Any]]:
        """Begin the next call together with the other ranks.

        Args:
            facts: What this rank is about to do; anything that can be pickled.
            why_diverged: From the facts of all: why they cannot make this call together, or an empty string.
            absent_s: How long to wait for a rank that is not at work.

        Returns:
            The facts of all.

        Raises:
            RanksDiverged: They cannot; raised on every rank that comes to this call, with the same reason.
        """
        try:
            return self._synchronize(facts, why_diverged, absent_s)
        except StoreUnavailable as fault:
            raise RanksDiverged(str(fault)) from fault

    def _synchronize(
        self,
        facts: dict[str, Any],
        why_diverged: Callable[[dict[int, dict[str, Any]]], str],
        absent_s: float | None,
    ) -> dict[int, dict[str, Any]]:
        heartbeat, store = self.heartbeat, self.heartbeat.store
        self.call, self._step = self.call + 1, 0
        key = f"{self.name}/{self.call}"
        heartbeat.come_to(self.name, str(self.call))
        own = {"facts": facts, "positions": self._positions(), "broken": sorted(self.broken)}
        store.put(f"{key}/{heartbeat.rank}", pickle.dumps(own))
        monitor = LivenessMonitor(
            heartbeat,
            self.name,
            str(self.call),
            timeouts.absent if absent_s is None else absent_s,
            False,
            None,
        )
        found, reason = self._collect(key, own, monitor, lambda: store.has(f"{key}/decided"))
        if not reason and len(found) == len(self.members):
            reason = why_diverged({rank: each["facts"] for rank, each in found.items()})
            reason = reason or next(
                (f"the process group {n} is out of step" for n in self._broken(found)), ""
            )
        try:
            reason = json.loads(store.settle(f"{key}/decided", json.dumps(reason)))
        except StoreUnavailable as fault:  # by one that has read the same, and ended
            raise RanksDiverged(reason or str(fault)) from fault
        if reason:
            self._wait_for_readers(key, found)
            raise RanksDiverged(reason)
        self._collect(key, own, monitor, lambda: False, found)
        self._clear(store)
        self._resume(found)
        return {rank: each["facts"] for rank, each in found.items()}

    def _wait_for_readers(self, key: str, found: dict[int, Any]) -> None:
        """Let the ranks that have come read why they diverge, before this one may end.

        Rank 0 may serve the store; without it the others could say no more than that it does not answer.
        """
        heartbeat = self.heartbeat
        with contextlib.suppress(StoreUnavailable):
            heartbeat.store.put(f"{key}/read/{heartbeat.rank}", b"")
            readers = [rank for rank in self._others if rank in found] if heartbeat.rank == 0 else []
            until = time.monotonic() + timeouts.ahead
            for rank in readers:
                while not heartbeat.store.has(f"{key}/read/{rank}") and time.monotonic() < until:
                    time.sleep(_POLL_INTERVALS_S[1])

    def announce(
        self, facts: dict[str, Any], why_diverged: Callable[[dict[int, dict[str, Any]]], str]
    ) -> str:
        """Publish what this rank does where others may synchronize, without waiting for them.

        Returns:
            Why it does not agree with the ranks that have come, or an empty string.
        """
        store, rank = self.heartbeat.store, self.heartbeat.rank
        self.call, self._step = self.call + 1, 0
        key = f"{self.name}/{self.call}"
        store.put(f"{key}/{rank}", pickle.dumps({"facts": facts, "positions": {}, "broken": []}))
        found = {rank: facts}
        for other in self._others:
            value = store.get(f"{key}/{other}")
            if value is not None:
                found[other] = pickle.loads(value)["facts"]
        return why_diverged(found)

    @staticmethod
    def _broken(found: dict[int, dict[str, Any]]) -> list[str]:
        return sorted({name for each in found.values() for name in each["broken"]})

    def _collect(
        self,
        key: str,
        own: Any,
        monitor: LivenessMonitor,
        is_over: Callable[[], bool],
        found: dict[int, Any] | None = None,
    ) -> tuple[dict[int, Any], str]:
        """What each rank has published under ``key``, and why one will not, if so."""
        store = self.heartbeat.store
        found = {} if found is None else found
        found[self.heartbeat.rank] = own
        pause, looked = _POLL_INTERVALS_S[0], time.monotonic()
        while missing := [rank for rank in self._others if rank not in found]:
            for rank in missing:
                value = store.get(f"{key}/{rank}")
                if value is not None:
                    found[rank] = pickle.loads(value)
            missing = [rank for rank in missing if rank not in found]
            if not missing or is_over():
                break
            if time.monotonic() - looked > _LIVENESS_INTERVAL_S:
                looked = time.monotonic()
                reason = monitor.reason(missing)
                # Read again: it may have come, and ended, since.
                if reason and not all(store.has(f"{key}/{rank}") for rank in missing):
                    return found, reason
            time.sleep(pause)
            pause = min(1.5 * pause, _POLL_INTERVALS_S[1])
        return found, ""

    def _clear(self, store: SharedStore) -> None:
        """Remove the previous call, which all ranks have left, from the store."""
        before = f"{self.name}/{self.call - 1}"
        store.remove(f"{before}/{self.heartbeat.rank}")
        if self.heartbeat.rank == self.members[0]:
            store.remove(f"{before}/decided")

    def _positions(self) -> dict[str, int]:
        if not _is_native():
            return {}
        with _disable_current_modes():  # of a script, which looks at operators of models
            return {name: _ops()._position(name) for name in self.groups}

    def _resume(self, found: dict[int, dict[str, Any]]) -> None:
        """Continue collectives at the foremost rank's position; those between belong to a failed call."""
        with self._lock, _disable_current_modes():
            self.needs_sync = False
            self._monitors.clear()
            for name in self.groups if _is_native() else ():
                theirs = (each["positions"].get(name, -1) for each in found.values())
                _ops()._resume(name, max(theirs))

    @contextlib.contextmanager
    def inside(self, publishes_end: bool = True) -> Iterator[None]:
        """The call that ranks make together. A rank that leaves it by an exception tells the others.

        Args:
            publishes_end: Whether the end is published at once.

        Raises:
            ParallelError: For errors of collectives.
        """
        heartbeat = self.heartbeat
        with heartbeat.lock:
            if not heartbeat.depth:
                heartbeat.current = (self.name, str(self.call))
            heartbeat.depth += 1
        try:
            yield
        except BaseException as fault:
            self.needs_sync = True
            lost = self._message(_of_process_group(fault)) if _FROM_GLOO.search(str(fault)) else ""
            with contextlib.suppress(ParallelError):
                heartbeat.leave(self.name, str(self.call), lost or _summary(fault))
            if isinstance(fault, (PeerUnavailable, StoreUnavailable)):
                raise ParallelError(str(fault)) from fault
            if isinstance(fault, RuntimeError) and not isinstance(fault, ParallelError):
                text = lost or str(fault).partition("\nException raised from")[0]
                if _FROM_COLLECTIVE.search(text):
                    raise ParallelError(self._why_left() or text) from fault
            raise
        finally:
            with heartbeat.lock:
                heartbeat.depth -= 1
            if publishes_end:
                with contextlib.suppress(ParallelError):
                    heartbeat.publish()

    def _why_left(self) -> str:
        """The message about a rank that published why it has left this call, or an empty string."""
        with contextlib.suppress(ParallelError):
            for rank in self._others:
                call, why = (self.heartbeat.state_of(rank) or {}).get("left", {}).get(self.name, ("", ""))
                # A rank that was left by others itself adds no information.
                if call == str(self.call) and "waited for" not in why:
                    return self._message(left_call_reason(rank, why))
        return ""

    def all_gather_object(self, value: Any, epoch: str = "") -> list[Any]:
        """The picklable ``value`` of each rank, in their order. All of them call it.

        Raises:
            ParallelError: A rank does not come.
        """
        self._step += 1
        store, key = self.heartbeat.store, f"{self.name}/{epoch}{self.call}/{self._step}"
        data = pickle.dumps(value)
        pieces = [data[first : first + _CHUNK_BYTES] for first in range(0, len(data), _CHUNK_BYTES)]
        for number, piece in enumerate(pieces[1:], 1):
            store.put(f"{key}/{self.heartbeat.rank}/{number}", piece)
        own = (len(pieces), pieces[0])
        store.put(f"{key}/{self.heartbeat.rank}", pickle.dumps(own))
        found, reason = self._collect(key, own, self._monitor(None), lambda: False)
        if reason:
            raise self._unavailable(reason)
        values = [self._joined(key, rank, *found[rank]) for rank in self.members]
        self._forget_step(epoch)
        self._last_pieces = len(pieces)
        return values

    _last_pieces = 0

    def _joined(self, key: str, rank: int, count: int, first: bytes) -> Any:
        store = self.heartbeat.store
        rest = [store.get(f"{key}/{rank}/{number}") or b"" for number in range(1, count)]
        return pickle.loads(b"".join([first, *rest]))

    def _forget_step(self, epoch: str) -> None:
        """Remove the previous value: every rank that has written the current one has read it."""
        key = f"{self.name}/{epoch}{self.call}/{self._step - 1}/{self.heartbeat.rank}"
        for each in (key, *(f"{key}/{number}" for number in range(1, self._last_pieces))):
            self.heartbeat.store.remove(each)

    def communicate(self, action: Callable[[], Any], group: str) -> Any:
        """``action()``, which runs collectives of the process group ``group`` and may block forever.

        Raises:
            ParallelError: A rank does not come, or has ended.
        """
        result: list[Any] = []
        is_inference = torch.is_inference_mode_enabled()

        def run() -> None:
            try:
                with torch.inference_mode(is_inference):
                    result.append((action(), None))
            except BaseException as fault:  # noqa: BLE001 - raised where it was asked for
                result.append((None, fault))

        thread = threading.Thread(target=run, name="liteboost-collective", daemon=True)
        thread.start()
        monitor = self._monitor(None)
        thread.join(_LIVENESS_INTERVAL_S)
        while thread.is_alive():
            reason = monitor.reason(self._others)
            if reason:
                self.broken.add(group)  # with a collective that is never finished
                raise self._unavailable(reason)
            thread.join(_LIVENESS_INTERVAL_S)
        value, fault = result[0]
        if isinstance(fault, RuntimeError):
            self.broken.add(group)
            raise self._unavailable(_of_process_group(fault)) from fault
        if fault is not None:
            raise fault
        return value

    def ended(self, fault: Exception) -> PeerUnavailable:
        """What is said of ``fault``, raised by a collective that a rank has ended in, or has not come to."""
        monitor = self._monitor(None)
        until = time.monotonic() + timeouts.ahead
        reason = ""
        with contextlib.suppress(StoreUnavailable):
            while not (reason := monitor.reason(self._others)) and time.monotonic() < until:
                time.sleep(_POLL_INTERVALS_S[1])
        return self._unavailable(reason or _of_process_group(fault))

    def _monitor(self, store: SharedStore | None) -> LivenessMonitor:
        if self.heartbeat.depth:
            return LivenessMonitor(self.heartbeat, *self.heartbeat.current, timeouts.absent, True, store)
        return LivenessMonitor(self.heartbeat, self.name, str(self.call), self.start_timeout_s, False, store)

    def _unavailable(self, reason: str) -> PeerUnavailable:
        return PeerUnavailable(self._message(reason))

    def _message(self, reason: str) -> str:
        size = len(self.members)
        return f"rank {self.heartbeat.rank} of {size} waited for the others, and {reason}"

    def check_waits(self, store: SharedStore | None, gone: str = "") -> None:
        """Interrupt collectives that wait for a rank that will not come. Called from another thread."""
        if not _is_native():
            return
        with self._lock:
            for name, members in list(self.groups.items()):
                if _ops()._waits(name) < _LIVENESS_INTERVAL_S:
                    self._monitors.pop(name, None)
                    continue
                if name not in self._monitors:
                    self._monitors[name] = self._monitor(store)
                others = [rank for rank in members if rank != self.heartbeat.rank]
                reason = gone or self._monitors[name].reason(others)
                if reason:
                    _ops()._interrupt(name, self._message(reason))


def _of_process_group(fault: BaseException) -> str:
    """What a failed collective of a process group says of the other ranks."""
    return f"one has ended or does something else ({str(fault).splitlines()[0]})"


def _summary(fault: BaseException) -> str:
    text = str(fault).strip().partition("\n")[0]
    return f"{type(fault).__name__}: {text[:500]}" if text else type(fault).__name__


def _ops() -> Any:
    return torch.ops.liteboost_parallel


def _is_native() -> bool:
    return torch._C._dispatch_has_kernel("liteboost_parallel::_interrupt")
