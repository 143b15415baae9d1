"""What ranks know of each other: a board that all can write to, and who is alive and at work.

Every rank says on the board, each half second and whenever it changes, whether it is at work in a call that
the ranks make together, to which calls it has come, and which it has left by an exception. Who waits for a
rank reads it there, and can tell one that is slow from one that will not come.
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

#: How often a rank says that it is there.
BEAT_S = 0.5
_STOPPED = "has been stopped"
#: A longer pause of this process is no waiting: the others may have been stopped with it.
_MOMENT_S = 1.0


@dataclass
class Limits:
    """How long ranks are waited for, in seconds.

    Attributes:
        to_come: At the first load, where processes start one after the other.
        absent: One that is not at work: it has left the call, was stopped, or does not say a thing.
        ahead: One that has gone on to a later call.
    """

    to_come: float = 15.0
    absent: float = 15.0
    ahead: float = 3.0


limits = Limits()
#: One that is alive and at work is given up, too, at last.
PATIENCE_S = 600.0


class BoardGone(ParallelError):
    """The process that serves the board has ended, or was stopped."""


@dataclass
class _Service:
    """What all lines of a process have in common.

    Attributes:
        gone: Why nobody answers any more; empty as long as somebody does.
    """

    gone: str = ""


class _Line(threading.Thread):
    """Does what it is asked in turn: who asks waits for so long as is right, however long that takes."""

    def __init__(self, service: _Service) -> None:
        super().__init__(name="liteboost-board", daemon=True)
        self.service = service
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], list[Any], threading.Event]]
        self._asked = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            action, result, is_done = self._asked.get()
            try:
                result.append((action(), None))
            except BaseException as fault:  # noqa: BLE001 - raised by who has asked
                result.append((None, fault))
            is_done.set()

    def ask(self, action: Callable[[], Any]) -> Any:
        """``action()``.

        Raises:
            BoardGone: It failed, or took too long.
        """
        if self.service.gone:
            raise BoardGone(self.service.gone)
        result: list[Any] = []
        is_done = threading.Event()
        self._asked.put((action, result, is_done))
        left = limits.absent
        while (
            not is_done.wait(BEAT_S) and left > 0 and not self.service.gone
        ):  # counts no time in which this process was stopped
            left -= BEAT_S
        value, fault = result[0] if result else (None, f"no answer for {limits.absent:.0f} s")
        if fault is None:
            return value
        self.service.gone = self.service.gone or (
            "the store by which the ranks find each other does not answer: the process that serves it, rank "
            "0 or the launcher, has ended or was stopped; its own output says why "
            f"({str(fault).partition(chr(10))[0]})"
        )
        raise BoardGone(self.service.gone)


class Board:
    """Values under keys, which all ranks see: a store of ``torch.distributed``.

    Every method raises `BoardGone` where nobody serves it any more.
    """

    def __init__(self, store: Any, service: _Service | None = None) -> None:
        self._store = store
        self._line = _Line(service or _Service())

    def clone(self) -> Board:
        """The same by a connection of its own, for another thread."""
        return Board(self._line.ask(self._store.clone), self._line.service)

    def put(self, key: str, value: bytes) -> None:
        """Write ``value``."""
        self._line.ask(lambda: self._store.set(key, base64.b64encode(value).decode()))

    def has(self, key: str) -> bool:
        """Whether something was written under ``key``."""
        return bool(self._line.ask(lambda: self._store.check([key])))

    def get(self, key: str) -> bytes | None:
        """What was written under ``key``; None: nothing yet."""
        found = self._line.ask(lambda: self._store.get(key) if self._store.check([key]) else None)
        return None if found is None else base64.b64decode(found)

    def settle(self, key: str, proposed: str) -> str:
        """The first of what was ever ``proposed`` under ``key``: the same for all who ask."""
        return bytes(self._line.ask(lambda: self._store.compare_set(key, "", proposed))).decode()

    def remove(self, key: str) -> None:
        """Forget ``key``; a store that cannot keeps it."""
        with contextlib.suppress(BoardGone):
            self._line.ask(lambda: _removed(self._store, key))


def _removed(store: Any, key: str) -> None:
    with contextlib.suppress(RuntimeError, NotImplementedError):
        store.delete_key(key)


class Presence:
    """This rank's entry on the board, and what it reads of the others'.

    Attributes:
        depth: How many calls this rank is in, one inside of the other.
        current: Group and number of the call that it is in, or was in at last.
    """

    def __init__(self, board: Board, rank: int, size: int) -> None:
        self.board, self.rank, self.size = board, rank, size
        self.lock = threading.RLock()
        self.depth = 0
        self.current = ("", "")
        self._beat = 0
        self._calls: dict[str, str] = {}
        self._left: dict[str, tuple[str, str]] = {}
        self._has_ended = False
        self._self = (host_processes.host(), os.getpid())
        self.say()

    def say(self, board: Board | None = None) -> None:
        """Write what there is to say of this rank."""
        with self.lock:
            self._beat += 1
            said = {
                "beat": self._beat,
                "at_work": self.depth > 0,
                "calls": self._calls,
                "left": self._left,
                "ended": self._has_ended,
                "host": self._self[0],
                "process": self._self[1],
            }
            text = json.dumps(said)
        (board or self.board).put(f"presence/{self.rank}", text.encode())

    def come_to(self, group: str, call: str) -> None:
        """Say that this rank has come to ``call`` of ``group``."""
        with self.lock:
            self._calls[group] = call
        self.say()

    def leave(self, group: str, call: str, reason: str) -> None:
        """Say that this rank has left ``call`` of ``group`` by an exception."""
        with self.lock:
            self._left[group] = (call, reason)
        self.say()

    def end(self) -> None:
        """Say that this rank comes to nothing any more."""
        self._has_ended = True
        with contextlib.suppress(ParallelError):
            self.say()

    def of(self, rank: int, board: Board | None = None) -> dict[str, Any] | None:
        """What ``rank`` has said of itself; None: nothing yet."""
        found = (board or self.board).get(f"presence/{rank}")
        return None if found is None else json.loads(found)


def left_by(rank: int, why: str) -> str:
    """What is said of a rank that has left a call by an exception; of one that was left itself, why."""
    _, _, first = why.partition("waited for the others, and ")
    return first or f"rank {rank} has left the call that all ranks are in, by {why}"


class Vigil:
    """Judges whether ranks will come to a call, while somebody waits for them.

    Args:
        group, call: What they are waited for in.
        absent_s: How long one may be away that is not at work.
        is_in_call: Whether they have been there already: who is elsewhere has left.
    """

    def __init__(
        self,
        presence: Presence,
        group: str,
        call: str,
        absent_s: float,
        is_in_call: bool,
        board: Board | None,
    ) -> None:
        self._presence, self._group, self._call = presence, group, call
        self._absent_s, self._is_in_call, self._board = absent_s, is_in_call, board
        self._away: dict[int, float] = {}
        self._beats: dict[int, tuple[int, float]] = {}
        self._last = time.monotonic()

    def reason(self, ranks: Iterable[int]) -> str:
        """Why one of ``ranks`` will not come, or an empty string. Asked again and again."""
        now = time.monotonic()
        passed, self._last = min(now - self._last, _MOMENT_S), now
        reasons = [self._reason(rank, passed) for rank in ranks]
        return next((each for each in reasons if each), "")

    def _reason(self, rank: int, passed: float) -> str:
        said = self._presence.of(rank, self._board)
        if said is None:
            return self._away_for(rank, passed, "has not been heard of", self._absent_s)
        name = f"rank {rank} (process {said['process']})"
        call, why = said["left"].get(self._group, ("", ""))
        if self._is_in_call and call == self._call:
            return left_by(rank, why)
        if said["ended"]:
            return f"{name} has ended; its own output says why"
        state = host_processes.state(said["host"], said["process"])
        if state == host_processes.ENDED:
            return f"{name} has ended; its own output says why"
        if state == host_processes.STOPPED:
            return self._away_for(rank, passed, _STOPPED, self._absent_s)
        if self._is_in_call and said["calls"].get(self._group) != self._call:
            return self._away_for(rank, passed, "has gone on to something else", limits.ahead)
        if state == host_processes.UNKNOWN and self._is_silent(rank, said["beat"], passed):
            return f"{name}, on another host, has given no sign of life for {limits.absent:.0f} s"
        if said["at_work"]:
            self._away.pop(rank, None)
            return ""
        what = "has left the call that it was in" if self._is_in_call else "has not come"
        return self._away_for(rank, passed, what, self._absent_s)

    def _away_for(self, rank: int, passed: float, what: str, limit: float) -> str:
        self._away[rank] = self._away.get(rank, 0.0) + passed
        if self._away[rank] < limit:
            return ""
        if self._is_in_call:
            return f"rank {rank} {what}, and was waited for {limit:.0f} s"
        # Those that are not there either are named with it, though they may have been noticed a moment later.
        away = sorted(each for each, spent in self._away.items() if spent > limit / 2)
        named = f"rank {away[0]} has" if len(away) == 1 else f"ranks {', '.join(map(str, away))} have"
        stopped = " (it was stopped)" if what == _STOPPED else ""
        return f"{named} not come within {limit:.0f} s{stopped}"

    def _is_silent(self, rank: int, beat: int, passed: float) -> bool:
        last, silent = self._beats.get(rank, (-1, 0.0))
        self._beats[rank] = (beat, 0.0 if beat != last else silent + passed)
        return self._beats[rank][1] >= limits.absent


class _Watcher(threading.Thread):
    """Says that this rank is there, and looks after whoever waits where Python does not."""

    def __init__(self, presence: Presence) -> None:
        super().__init__(name="liteboost-ranks", daemon=True)
        self.presence = presence
        self.looks: list[Any] = []
        self._is_over = threading.Event()

    def run(self) -> None:
        gone, board = "", None
        try:
            board = self.presence.board.clone()
        except BoardGone as fault:
            gone = str(fault)
        while not self._is_over.wait(BEAT_S):
            try:
                if not gone:
                    self.presence.say(board)
                for look in list(self.looks):
                    look(board, gone)
            except BoardGone as fault:
                gone = str(fault)

    def stop(self) -> None:
        """At the end of the process: nothing of it may talk while what it talks by is taken down."""
        self._is_over.set()
        self.join(timeout=2 * BEAT_S)
        self.presence.end()


_open: dict[int, _Watcher] = {}
_lock = threading.Lock()


def of_process(open_board: Any) -> Presence:
    """The presence of this process; ``open_board()`` makes the board where there is none yet."""
    with _lock:
        watcher = _open.get(os.getpid())  # a fork is no rank, and has no thread
        if watcher is None:
            rank, size = ranks()
            watcher = _open[os.getpid()] = _Watcher(Presence(open_board(), rank, size))
            watcher.start()
            atexit.register(watcher.stop)
        return watcher.presence


def look_after(look: Any) -> None:
    """Have ``look(board, gone)`` called each half second, in a thread; ``gone``: why the board is, or ''."""
    _open[os.getpid()].looks.append(look)


def ranks() -> tuple[int, int]:
    """(rank, number) of this process among all."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return config.launched() or (0, 1)
