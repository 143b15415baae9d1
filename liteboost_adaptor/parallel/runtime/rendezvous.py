"""How ranks find each other: the store they connect to first, and the process group they create."""

from __future__ import annotations

import datetime
import functools
import socket
import time
from typing import Any

import torch.distributed as dist

from ... import config
from ...errors import ParallelError
from .heartbeat import COLLECTIVE_TIMEOUT_S, timeouts

#: How long a process group waits for a rank that is alive.
COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S)
_PERIOD_S = 0.02


@functools.cache
def store() -> Any:
    """The store by which the ranks find each other: torchrun's, a process group's, or one that rank 0 serves.

    Raises:
        ParallelError: Rank 0 has not come to serve it.
    """
    place = config.agent_store()
    if place is not None:
        host, port, attempt = place
        served = dist.TCPStore(host, port, is_master=False, timeout=COLLECTIVE_TIMEOUT)
        return dist.PrefixStore(f"liteboost/{attempt}", served)
    if dist.is_initialized():
        return dist.PrefixStore("liteboost", dist.distributed_c10d._get_default_store())
    return dist.PrefixStore("liteboost", _store_of_rank_0())


def make_process_group(backend: str) -> None:
    """Create the process group of all ranks, which are connected to the store."""
    if config.agent_store() is not None:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
        return
    rank, size = _launched()
    named = dist.PrefixStore("default_pg", _store_of_rank_0())
    dist.init_process_group(backend, store=named, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)


def _launched() -> tuple[int, int]:
    found = config.launched()
    if found is None:
        raise ParallelError(
            "a model is sharded over the processes of a launcher, and none has started this one (RANK, "
            "WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not all set). Start it with "
            "`torchrun --nproc-per-node=N`, or call torch.distributed.init_process_group first."
        )
    return found


@functools.cache
def _store_of_rank_0() -> dist.TCPStore:
    rank, size = _launched()
    host, port = config.master()
    where = f" MASTER_ADDR={host}, MASTER_PORT={port} is where it should be."
    if rank != 0 and not _listens(host, port):
        raise ParallelError(f"rank 0 has not come within {timeouts.start:.0f} s{hint(size)}{where}")
    try:
        # As torch.distributed makes it, but for the waiting, which says who is missing.
        return dist.TCPStore(
            host, port, size, rank == 0, timeout=COLLECTIVE_TIMEOUT, wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as fault:
        if rank == 0:
            raise ParallelError(
                f"rank 0 cannot listen on MASTER_ADDR={host}, MASTER_PORT={port}, where the others look for "
                f"it ({str(fault).splitlines()[0]}). Choose another port for every rank."
            ) from fault
        raise ParallelError(f"rank 0 does not answer{hint(size)}{where}") from fault


def _listens(host: str, port: int) -> bool:
    """Whether somebody does in time; a store that tries by itself takes up to twice as long."""
    deadline = time.monotonic() + timeouts.start
    while True:
        try:
            socket.create_connection((host, port), timeout=1).close()
        except (OSError, UnicodeError):  # the latter of what can be no name of a host
            if time.monotonic() > deadline:
                return False
            time.sleep(_PERIOD_S)
        else:
            return True


def hint(size: int) -> str:
    """What it may mean that ranks have not come, and what to do."""
    return (
        f", of {size} processes that are to share a model (WORLD_SIZE={size}): not started, ended before "
        "(its own output says why), at something else, or started with another LITEBOOST_LEVEL or "
        "LITEBOOST_TP. Start all of them, best with torchrun. Where they need longer, let them wait for each "
        "other first (torch.distributed.init_process_group and barrier)."
    )


def compare(ranks: list[int], found: list[dict[str, Any]]) -> None:
    """Raise `ParallelError` where ``found``, facts of each of ``ranks``, differ."""
    reason = difference(ranks, found)
    if reason:
        raise ParallelError(f"{reason}. Start every rank with the same program, model and settings.")


def difference(ranks: list[int], found: list[dict[str, Any]]) -> str:
    """How ``found``, facts of each of ``ranks``, differ, or an empty string."""
    for name in found[0]:
        values = {
            rank: each.get(name) for rank, each in sorted(zip(ranks, found, strict=True), key=lambda x: x[0])
        }
        if len({str(value) for value in values.values()}) > 1:
            said = "; ".join(f"rank {rank}: {value}" for rank, value in values.items())
            return f"the ranks have been started with different {name.replace('_', ' ')} ({said})"
    return ""
