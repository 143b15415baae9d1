"""Faults planted in operators while a program runs on the simulator."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def failing(*faults: str) -> Iterator[None]:
    """Inside, operators return error codes.

    A fault is ``aclnnX:561002`` (phase 1, every call), ``aclnnX@2:361001`` (phase 2), ``aclnnX@3:507015`` (on
    the device; after one in a replay every wait tells) or ``aclnnX:561002:3`` (the third call only); names
    may have ``*``. ``SIMCANN_FAIL`` says the same for a whole program, separated by commas.
    """
    library = _library()
    library.simcann_fail(",".join(faults).encode())
    try:
        yield
    finally:
        library.simcann_fail(b"")


@contextmanager
def wrong(*names: str) -> Iterator[None]:
    """Inside, these operators compute wrong numbers; ``*`` as above; ``SIMCANN_WRONG`` for a program."""
    library = _library()
    library.simcann_wrong(",".join(names).encode())
    try:
        yield
    finally:
        library.simcann_wrong(b"")


def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libopapi.so")
