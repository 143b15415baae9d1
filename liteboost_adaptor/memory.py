"""How much memory there is, and giving back what was freed."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Memory that can still be taken without swapping: what machine, container and process leave."""
    free = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free.append(next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")))
    with suppress(OSError, ValueError):  # "max", or no cgroup
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        # Cached file pages count as used but are given up on demand.
        free.append(limit - used + int(statistics.get("inactive_file", 0)))
    with suppress(ImportError, OSError, ValueError):
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            free.append(limit - pages * os.sysconf("SC_PAGE_SIZE"))
    return min(free)


def give_back() -> None:
    """Give the system back what the allocator keeps of memory that was freed, where it is glibc's."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
