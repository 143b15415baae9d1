"""Processes of this host: whether they are alive, and which host this is."""

from __future__ import annotations

import functools
import os
import secrets

ALIVE, STOPPED, ENDED, UNKNOWN = "alive", "stopped", "ended", "unknown"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_STATES = {"T": STOPPED, "t": STOPPED, "Z": ENDED, "X": ENDED}


def host() -> str:
    """What only processes that see the same /dev/shm and the same process numbers have in common."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            boot = file.read().strip()
        shared, numbers = os.stat("/dev/shm"), os.stat("/proc/self/ns/pid")
    except OSError as fault:
        return f"unknown ({fault}) {secrets.token_hex(8)}"
    return f"{boot} {shared.st_dev}:{shared.st_ino} {numbers.st_ino}"


def state(where: str, process: int) -> str:
    """Of ``process`` of the host that calls itself ``where``; `UNKNOWN` of another host's."""
    if where != _own_host():
        return UNKNOWN
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            text = file.read()
    except FileNotFoundError:
        return ENDED
    except OSError:
        return ALIVE
    return _STATES.get(text.rpartition(")")[2].strip()[:1], ALIVE)


@functools.cache
def _own_host() -> str:
    return host()
