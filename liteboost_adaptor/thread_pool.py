"""Threads that OpenMP keeps for each thread that has called operators, given back where it will wait.

libgomp keeps such threads for every thread of Python by itself. Once there are more of them in all than cores
they hardly spin any more between two operators (``gomp_throttled_spin_count_var`` in its source): they go to
sleep behind each and are woken for the next. So a server, or a ``generate`` in a thread beside
``TextIteratorStreamer``, takes 1.2 to 1.5 times as long a token where the main thread has loaded the model,
though that does nothing any more.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

#: ``omp_pause_soft`` of OpenMP 5.0: what the threads have set stays.
_SOFT = 1


def release() -> None:
    """Let go of the threads that stand by for operators of this thread; the next one makes them anew.

    Takes some 0.1 ms then. Nothing where torch is not built with an OpenMP that can.
    """
    _pause()(_SOFT)


@functools.cache
def _pause() -> Callable[[int], int]:
    """``omp_pause_resource_all`` of the library that torch has loaded, or what does nothing."""
    try:
        return ctypes.CDLL(None).omp_pause_resource_all
    except (AttributeError, OSError, TypeError):  # TypeError: Windows has no library of the process itself
        return lambda kind: 0
