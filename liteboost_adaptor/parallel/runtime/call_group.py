"""Ranks that make the same calls: where they meet, what they tell each other, how a call ends.

Calls of a group are numbered. Before each, every rank writes what it is about to do and waits for the others;
whether they do it together is decided once, for all (`Board.settle`). So ranks that come late, and those that
have given them up, go the same way.
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
from .heartbeat import Board, BoardGone, Presence, Vigil, left_by, limits

#: Between two looks at the board, at first and at last.
_PAUSES_S = (0.0002, 0.02)
#: Between two looks at who is alive.
_LOOK_S = 0.2
#: Of one value on the board; longer ones are several.
_PIECE_BYTES = 2 << 20
_FROM_COLLECTIVE = re.compile(r"rank \d+ .*collective|waited for the others")


class Apart(Exception):
    """The ranks work each for itself from now on; says why."""


class Waited(ParallelError):
    """A rank was waited for in vain: nobody can be told of it who waits for the same."""


class Circle:
    """One group of ranks, as one of them sees it.

    Attributes:
        call: Number of the present call, or of the last one.
        must_meet: Whether this rank has left a call by an exception: nobody knows how far the others came.
        groups: Process groups of ``torch.distributed`` by which tensors are exchanged in its calls, by their
            names, and the ranks of each.
        lost: Those of them in which something was begun that is never finished.
        to_come_s: How long ranks are waited for that are not in a call yet.
    """

    def __init__(self, presence: Presence, name: str, members: list[int]) -> None:
        self.presence, self.name, self.members = presence, name, members
        self.call = 0
        self.must_meet = False
        self.groups: dict[str, list[int]] = {}
        self.lost: set[str] = set()
        self.to_come_s = limits.to_come
        self._step = 0
        self._lock = threading.RLock()
        self._vigils: dict[str, Vigil] = {}

    @property
    def _others(self) -> list[int]:
        return [rank for rank in self.members if rank != self.presence.rank]

    def meet(
        self,
        facts: dict[str, Any],
        why_apart: Callable[[dict[int, dict[str, Any]]], str],
        absent_s: float | None = None,
    ) -> dict[int, dict[str, Any]]:
        """Begin the next call together with the other ranks.

        Args:
            facts: Of this rank; what `pickle` takes.
            why_apart: Of the facts of all: why they cannot make this call together, or an empty string.
            absent_s: How long one that is not at work is waited for.

        Returns:
            The facts of all.

        Raises:
            Apart: They cannot; on every rank that comes to this call, with the same reason.
        """
        try:
            return self._meet(facts, why_apart, absent_s)
        except BoardGone as fault:
            raise Apart(str(fault)) from fault

    def _meet(
        self,
        facts: dict[str, Any],
        why_apart: Callable[[dict[int, dict[str, Any]]], str],
        absent_s: float | None,
    ) -> dict[int, dict[str, Any]]:
        presence, board = self.presence, self.presence.board
        self.call, self._step = self.call + 1, 0
        key = f"{self.name}/{self.call}"
        presence.come_to(self.name, str(self.call))
        own = {"facts": facts, "positions": self._positions(), "lost": sorted(self.lost)}
        board.put(f"{key}/{presence.rank}", pickle.dumps(own))
        vigil = Vigil(
            presence, self.name, str(self.call), limits.absent if absent_s is None else absent_s, False, None
        )
        found, reason = self._collect(key, own, vigil, lambda: board.has(f"{key}/decided"))
        if not reason and len(found) == len(self.members):
            reason = why_apart({rank: each["facts"] for rank, each in found.items()})
            reason = reason or next((f"the process group {n} is out of step" for n in self._lost(found)), "")
        try:
            reason = json.loads(board.settle(f"{key}/decided", json.dumps(reason)))
        except BoardGone as fault:  # by one that has read the same, and ended
            raise Apart(reason or str(fault)) from fault
        if reason:
            raise Apart(reason)
        self._collect(key, own, vigil, lambda: False, found)
        self._clear(board)
        self._resume(found)
        return {rank: each["facts"] for rank, each in found.items()}

    def pass_by(self, facts: dict[str, Any], why_apart: Callable[[dict[int, dict[str, Any]]], str]) -> str:
        """Say what this rank does where others may meet, without waiting for them.

        Returns:
            Why it does not fit with those that have come, or an empty string.
        """
        board, rank = self.presence.board, self.presence.rank
        self.call, self._step = self.call + 1, 0
        key = f"{self.name}/{self.call}"
        board.put(f"{key}/{rank}", pickle.dumps({"facts": facts, "positions": {}, "lost": []}))
        found = {rank: facts}
        for other in self._others:
            value = board.get(f"{key}/{other}")
            if value is not None:
                found[other] = pickle.loads(value)["facts"]
        return why_apart(found)

    @staticmethod
    def _lost(found: dict[int, dict[str, Any]]) -> list[str]:
        return sorted({name for each in found.values() for name in each["lost"]})

    def _collect(
        self,
        key: str,
        own: Any,
        vigil: Vigil,
        is_over: Callable[[], bool],
        found: dict[int, Any] | None = None,
    ) -> tuple[dict[int, Any], str]:
        """What each rank has written under ``key``, and why one will not, if so."""
        board = self.presence.board
        found = {} if found is None else found
        found[self.presence.rank] = own
        pause, looked = _PAUSES_S[0], time.monotonic()
        while missing := [rank for rank in self._others if rank not in found]:
            for rank in missing:
                value = board.get(f"{key}/{rank}")
                if value is not None:
                    found[rank] = pickle.loads(value)
            missing = [rank for rank in missing if rank not in found]
            if not missing or is_over():
                break
            if time.monotonic() - looked > _LOOK_S:
                looked = time.monotonic()
                reason = vigil.reason(missing)
                # Read again: it may have come, and ended, since.
                if reason and not all(board.has(f"{key}/{rank}") for rank in missing):
                    return found, reason
            time.sleep(pause)
            pause = min(1.5 * pause, _PAUSES_S[1])
        return found, ""

    def _clear(self, board: Board) -> None:
        """Forget the call before this one, which all ranks have left."""
        before = f"{self.name}/{self.call - 1}"
        board.remove(f"{before}/{self.presence.rank}")
        if self.presence.rank == self.members[0]:
            board.remove(f"{before}/decided")

    def _positions(self) -> dict[str, int]:
        if not _is_native():
            return {}
        with _disable_current_modes():  # of a script, which looks at operators of models
            return {name: _ops()._position(name) for name in self.groups}

    def _resume(self, found: dict[int, dict[str, Any]]) -> None:
        """Let collectives go on from where the foremost rank is; those between were of a call that failed."""
        with self._lock, _disable_current_modes():
            self.must_meet = False
            self._vigils.clear()
            for name in self.groups if _is_native() else ():
                theirs = (each["positions"].get(name, -1) for each in found.values())
                _ops()._resume(name, max(theirs))

    @contextlib.contextmanager
    def inside(self, is_said: bool = True) -> Iterator[None]:
        """The call that ranks make together. Who leaves it by an exception tells the others.

        Args:
            is_said: Whether the others read at once that it is over.

        Raises:
            ParallelError: For errors of collectives.
        """
        presence = self.presence
        with presence.lock:
            if not presence.depth:
                presence.current = (self.name, str(self.call))
            presence.depth += 1
        try:
            yield
        except BaseException as fault:
            self.must_meet = True
            with contextlib.suppress(ParallelError):
                presence.leave(self.name, str(self.call), _said(fault))
            if isinstance(fault, (Waited, BoardGone)):
                raise ParallelError(str(fault)) from fault
            if isinstance(fault, RuntimeError) and not isinstance(fault, ParallelError):
                if _FROM_COLLECTIVE.search(str(fault)):
                    text = str(fault).partition("\nException raised from")[0]
                    raise ParallelError(self._why_left() or text) from fault
            raise
        finally:
            with presence.lock:
                presence.depth -= 1
            if is_said:
                with contextlib.suppress(ParallelError):
                    presence.say()

    def _why_left(self) -> str:
        """The sentence for a rank that says why it has left this call, or an empty string."""
        with contextlib.suppress(ParallelError):
            for rank in self._others:
                call, why = (self.presence.of(rank) or {}).get("left", {}).get(self.name, ("", ""))
                # Who was left by others, too, says nothing new.
                if call == str(self.call) and "waited for" not in why:
                    return self._sentence(left_by(rank, why))
        return ""

    def gathered(self, value: Any, epoch: str = "") -> list[Any]:
        """What each rank has for ``value``, which can be pickled, in their order. In a call of all of them.

        Raises:
            ParallelError: A rank does not come.
        """
        self._step += 1
        board, key = self.presence.board, f"{self.name}/{epoch}{self.call}/{self._step}"
        data = pickle.dumps(value)
        pieces = [data[first : first + _PIECE_BYTES] for first in range(0, len(data), _PIECE_BYTES)]
        for number, piece in enumerate(pieces[1:], 1):
            board.put(f"{key}/{self.presence.rank}/{number}", piece)
        own = (len(pieces), pieces[0])
        board.put(f"{key}/{self.presence.rank}", pickle.dumps(own))
        found, reason = self._collect(key, own, self._vigil(None), lambda: False)
        if reason:
            raise self._failed(reason)
        values = [self._joined(key, rank, *found[rank]) for rank in self.members]
        self._forget_step(epoch)
        self._last_pieces = len(pieces)
        return values

    _last_pieces = 0

    def _joined(self, key: str, rank: int, count: int, first: bytes) -> Any:
        board = self.presence.board
        rest = [board.get(f"{key}/{rank}/{number}") or b"" for number in range(1, count)]
        return pickle.loads(b"".join([first, *rest]))

    def _forget_step(self, epoch: str) -> None:
        """Forget the value before the last one: who has written this one has read it."""
        key = f"{self.name}/{epoch}{self.call}/{self._step - 1}/{self.presence.rank}"
        for each in (key, *(f"{key}/{number}" for number in range(1, self._last_pieces))):
            self.presence.board.remove(each)

    def talk(self, action: Callable[[], Any], group: str) -> Any:
        """``action()``, which exchanges tensors by the process group ``group``, and can wait for ever.

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

        thread = threading.Thread(target=run, name="liteboost-exchange", daemon=True)
        thread.start()
        vigil = self._vigil(None)
        thread.join(_LOOK_S)
        while thread.is_alive():
            reason = vigil.reason(self._others)
            if reason:
                self.lost.add(group)  # what was begun there is never finished
                raise self._failed(reason)
            thread.join(_LOOK_S)
        value, fault = result[0]
        if isinstance(fault, RuntimeError):
            self.lost.add(group)
            raise self._failed(
                f"one has ended or does something else ({str(fault).splitlines()[0]})"
            ) from fault
        if fault is not None:
            raise fault
        return value

    def _vigil(self, board: Board | None) -> Vigil:
        if self.presence.depth:
            return Vigil(self.presence, *self.presence.current, limits.absent, True, board)
        return Vigil(self.presence, self.name, str(self.call), self.to_come_s, False, board)

    def _failed(self, reason: str) -> Waited:
        return Waited(self._sentence(reason))

    def _sentence(self, reason: str) -> str:
        size = len(self.members)
        return f"rank {self.presence.rank} of {size} waited for the others, and {reason}"

    def look(self, board: Board | None, gone: str = "") -> None:
        """End the waits of collectives for a rank that will not come. From another thread."""
        if not _is_native():
            return
        with self._lock:
            for name, members in list(self.groups.items()):
                if _ops()._waits(name) < _LOOK_S:
                    self._vigils.pop(name, None)
                    continue
                if name not in self._vigils:
                    self._vigils[name] = self._vigil(board)
                others = [rank for rank in members if rank != self.presence.rank]
                reason = gone or self._vigils[name].reason(others)
                if reason:
                    _ops()._interrupt(name, self._sentence(reason))


def _said(fault: BaseException) -> str:
    text = str(fault).strip().partition("\n")[0]
    return f"{type(fault).__name__}: {text[:500]}" if text else type(fault).__name__


def _ops() -> Any:
    return torch.ops.liteboost_parallel


def _is_native() -> bool:
    return torch._C._dispatch_has_kernel("liteboost_parallel::_interrupt")
