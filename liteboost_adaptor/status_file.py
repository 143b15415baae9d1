"""``LITEBOOST_STATUS_FILE``: the status of a process whose code nobody can edit, written by itself.

At SIGUSR1 a thread writes, not the handler: the code that the signal interrupts may hold a lock that the
status needs.
"""

from __future__ import annotations

import _thread
import atexit
import os
import signal
import sys
import threading
import warnings
from types import FrameType

#: Imported before any model can be served; a launcher that only starts others never imports it.
_SERVING = "liteboost_adaptor.huggingface.runtime"
NUMBER = "%p"
#: How long the end by SIGTERM is put off at most, in seconds.
PATIENCE = 10.0


class StatusFile:
    """Writes the status of this process.

    Args:
        path: As ``LITEBOOST_STATUS_FILE`` has it.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self.process = os.getpid()
        self.unheard = ""  # why SIGUSR1 is not followed

    def start(self) -> None:
        """Write when this process ends, also by SIGTERM, and at SIGUSR1, where nobody else handles these."""
        atexit.register(self.at_exit)
        try:
            if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
                signal.signal(signal.SIGUSR1, self._at_signal)
            else:
                self.unheard = "it has another handler, or is ignored"
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._at_end_by_signal)
                # A fork forgets which signals Python has noted; one that came until then would be lost.
                os.register_at_fork(before=_hold_signals, after_in_child=_let_in, after_in_parent=_let_in)
        except ValueError:
            self.unheard = (
                "liteboost_adaptor was imported in a thread, and only the main one may set a handler"
            )

    def at_exit(self) -> None:
        """Write, unless this is a fork that would write over its parent's file."""
        if os.getpid() == self.process or NUMBER in self.path:
            self.write()

    def _at_signal(self, number: int, frame: FrameType | None) -> None:
        # Not `threading.Thread`, whose start takes a lock that the interrupted code may hold.
        _thread.start_new_thread(self.write, ())

    def _at_end_by_signal(self, number: int, frame: FrameType | None) -> None:
        """Write, and then end as the signal ends a process. A server raises it once it has closed."""
        signal.signal(number, signal.SIG_DFL)  # the second one does not wait
        try:
            if os.getpid() == self.process:  # the locks of a fork may be held by threads it does not have
                written = _thread.allocate_lock()
                written.acquire()
                _thread.start_new_thread(self._write_and_release, (written,))
                # Not for ever: the interrupted code may hold what the status needs.
                written.acquire(timeout=PATIENCE)
        finally:
            os.kill(os.getpid(), number)

    def _write_and_release(self, written: _thread.LockType) -> None:
        try:
            self.write()
        finally:
            written.release()

    def write(self) -> None:
        """Write the file as a whole or not at all; a fault is a warning, and a note of the status."""
        if _SERVING not in sys.modules:
            return
        from . import api

        path = self.path.replace(NUMBER, str(os.getpid()))
        beside = f"{path}.{os.getpid()}-{_thread.get_ident()}.tmp"
        try:
            if self.unheard:
                _note(f"SIGUSR1 writes no status: {self.unheard}.")
            status = api.status()
            text = status.to_json() if path.endswith(".json") else str(status)
            with open(beside, "w", encoding="utf-8") as file:
                file.write(text + "\n")
            os.replace(beside, path)
        except Exception as fault:  # noqa: BLE001 - noted; a program does not end because of its status
            sentence = f"The status was not written to {path}: {type(fault).__name__}: {fault}"
            _note(sentence)
            warnings.warn(f"{sentence}. Change or unset LITEBOOST_STATUS_FILE.", stacklevel=2)


_before_fork = threading.local()


def _hold_signals() -> None:
    _before_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})


def _let_in() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before_fork.mask)


def _note(sentence: str) -> None:
    from .report import report

    report.note(sentence)


def start(path: str) -> None:
    """Follow ``LITEBOOST_STATUS_FILE``; nothing where it is empty."""
    if path:
        StatusFile(path).start()
