"""How ranks find each other: what they compare before they work together, and the process group they make."""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import socket
import time
from typing import Any

import torch.distributed as dist

from .. import config
from ..errors import ParallelError

#: How long a rank waits for one that is alive; one that has ended is noticed at once.
PATIENCE = datetime.timedelta(minutes=10)
#: How long ranks wait for one that has never been heard of, where no launcher says whether it is alive.
TO_COME = datetime.timedelta(seconds=25)
_PERIOD_S = 0.02


def make_process_group(backend: str) -> None:
    """Make the process group of all ranks as a launcher's variables say.

    ``torchrun`` ends the others when a rank ends, so there the others are waited for. Other launchers may not
    have started every rank: those that are missing after some seconds are named.

    Raises:
        ParallelError: A rank has not come, or has ended meanwhile.
    """
    if config.agent_store() is not None:
        return dist.init_process_group(backend, timeout=PATIENCE)
    rank, size = config.launched()
    store = _store_of_rank_0(rank, size)
    try:
        store.set(f"liteboost/come/{rank}", "")
        _wait_for_all(store, rank, size)
        named = dist.PrefixStore("default_pg", store)
        dist.init_process_group(backend, store=named, rank=rank, world_size=size, timeout=PATIENCE)
        store.set_timeout(PATIENCE)
    except ParallelError:
        raise
    except RuntimeError as fault:
        raise ParallelError(
            f"rank {rank} of {size} has met the others, and one has ended since; its own output says why "
            f"({str(fault).splitlines()[0]})"
        ) from fault


def _store_of_rank_0(rank: int, size: int) -> dist.TCPStore:
    host, port = config.master()
    where = f" MASTER_ADDR={host}, MASTER_PORT={port} is where it should be."
    if rank != 0 and not _listens(host, port):
        raise _missing([0], size, where)
    try:
        # As torch.distributed makes it, but for the waiting, which says who is missing.
        return dist.TCPStore(
            host, port, size, rank == 0, timeout=TO_COME, wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as fault:
        if rank == 0:
            raise ParallelError(
                f"rank 0 cannot listen on MASTER_ADDR={host}, MASTER_PORT={port}, where the others look for "
                f"it ({str(fault).splitlines()[0]}). Choose another port for every rank."
            ) from fault
        raise _missing([0], size, where) from fault


def _listens(host: str, port: int) -> bool:
    """Whether somebody does within `TO_COME`; a store that tries by itself takes up to twice as long."""
    deadline = time.monotonic() + TO_COME.total_seconds()
    while True:
        try:
            socket.create_connection((host, port), timeout=1).close()
        except (OSError, UnicodeError):  # the latter of what can be no name of a host
            if time.monotonic() > deadline:
                return False
            time.sleep(_PERIOD_S)
        else:
            return True


def _wait_for_all(store: dist.TCPStore, rank: int, size: int) -> None:
    deadline = time.monotonic() + TO_COME.total_seconds()
    missing = [other for other in range(size) if other != rank]
    while missing := [other for other in missing if not store.check([f"liteboost/come/{other}"])]:
        if time.monotonic() > deadline:
            raise _missing(missing, size)
        time.sleep(_PERIOD_S)


def _missing(ranks: list[int], size: int, where: str = "") -> ParallelError:
    named = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
    return ParallelError(
        f"{named} not come within {TO_COME.total_seconds():.0f} s, of {size} processes that are to share a "
        f"model (WORLD_SIZE={size}): not started, ended before (its own output says why), or started with "
        f"another LITEBOOST_LEVEL or LITEBOOST_TP.{where} Start all of them, best with torchrun. Where they "
        "need longer, call torch.distributed.init_process_group first, which waits as long as it is told to."
    )


@functools.cache
def _agent_store() -> Any:
    """The store that torchrun serves, or None where another launcher has started us."""
    place = config.agent_store()
    if place is None:
        return None
    host, port, attempt = place
    store = dist.TCPStore(host, port, is_master=False, timeout=PATIENCE)
    return dist.PrefixStore(f"liteboost/{attempt}", store)


#: How often ranks have compared what they start with.
_starts = itertools.count()


def compare_starts(facts: dict[str, str], waits: bool) -> None:
    """Compare ``facts`` over the ranks that torchrun has started, before they work together.

    Args:
        waits: Until all ranks have said theirs; else only with those that have.

    Raises:
        ParallelError: They differ; on those ranks that find it out, at which torchrun ends the others.
    """
    store = _agent_store()
    if store is None:
        return
    rank, size = config.launched()
    start = next(_starts)
    store.set(f"{start}/{rank}", json.dumps(facts))
    found = [facts]
    ranks = [rank]
    deadline = time.monotonic() + PATIENCE.total_seconds()
    for other in (each for each in range(size) if each != rank):
        while not (is_there := store.check([f"{start}/{other}"])) and waits and time.monotonic() < deadline:
            time.sleep(_PERIOD_S)
        if is_there:
            ranks.append(other)
            found.append(json.loads(store.get(f"{start}/{other}")))
        elif waits:
            raise ParallelError(
                f"rank {other} has not come to load a model within {PATIENCE.total_seconds():.0f} s. All "
                "processes load one together, each its part; with LITEBOOST_TP=1 each loads one of its own."
            )
    compare(ranks, found)


def compare(ranks: list[int], found: list[dict[str, Any]]) -> None:
    """Raise `ParallelError` where ``found``, facts of each of ``ranks``, differ."""
    for name in found[0]:
        values = {
            rank: each.get(name) for rank, each in sorted(zip(ranks, found, strict=True), key=lambda x: x[0])
        }
        if len({str(value) for value in values.values()}) > 1:
            said = "; ".join(f"rank {rank}: {value}" for rank, value in values.items())
            raise ParallelError(
                f"the ranks have been started with different {name.replace('_', ' ')} ({said}). Start every "
                "rank with the same program, model and settings."
            )
