"""Groups of ranks: their process groups, shared memory and call groups."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ... import config, native
from ...errors import ParallelError
from ...ops import collectives
from ...report import report
from . import heartbeat, rendezvous
from .call_group import CallGroup, PeerUnavailable
from .host_processes import host

#: Shared memory of each rank, and once more for the result; longer tensors pass through it in chunks.
_SLOT_BYTES = 1 << 20


@dataclass(frozen=True)
class Group:
    """Ranks that run collectives together.

    Attributes:
        name: Name of the process group, by which the collective ops find it.
    """

    name: str
    rank: int
    size: int


#: The call groups of this process, by the names of their process groups; that of all ranks also as `_WORLD`.
_call_groups: dict[str, CallGroup] = {}
_WORLD = "all"


@dataclass
class Divergence:
    """Whether the ranks work independently from now on, each on unsharded models.

    Attributes:
        reason: Why; empty while they work together.
    """

    reason: str = ""


divergence = Divergence()


def world() -> CallGroup:
    """The call group of all ranks, which may not have a process group yet.

    Raises:
        ParallelError: Rank 0, which serves the store, has not come.
    """
    call_group = _call_groups.get(_WORLD)
    if call_group is None:
        here = heartbeat.process_heartbeat(lambda: heartbeat.SharedStore(rendezvous.store().clone()))
        call_group = _call_groups[_WORLD] = CallGroup(here, _WORLD, list(range(here.size)))
        heartbeat.call_periodically(call_group.check_waits)
    return call_group


def call_group_of(group: Group) -> CallGroup:
    """The call group of ``group``."""
    return _call_groups[group.name]


def is_connected() -> bool:
    """Whether this rank is connected to the others."""
    return _WORLD in _call_groups


def register_group(group: Group, members: list[int]) -> None:
    """Register the call group of the ranks ``members`` of ``group``."""
    call_group = world()
    if len(members) == len(call_group.members):
        _call_groups[group.name] = call_group
    elif group.name not in _call_groups:
        _call_groups[group.name] = CallGroup(call_group.heartbeat, group.name, members)
        heartbeat.call_periodically(_call_groups[group.name].check_waits)
    _call_groups[group.name].groups[group.name] = members
    call_group.groups[group.name] = members


def join() -> Group:
    """The group of all processes; started by the variables that ``torchrun`` sets, unless it runs.

    Raises:
        ParallelError: There is no process group, and no launcher has said how to make one; or a rank does
            not come.
    """
    if not dist.is_available():
        raise ParallelError("this torch is built without torch.distributed, which several processes need")
    call_group = world()
    if not dist.is_initialized():
        _use_own_device()
        call_group.all_gather_object("process group")  # a rank that waits for missing ones here names them
        call_group.communicate(lambda: rendezvous.make_process_group(_backend()), _WORLD)
    default = dist.distributed_c10d._get_default_group()
    group = Group(default.group_name, dist.get_rank(), dist.get_world_size())
    register_group(group, call_group.members)
    share_memory(group)
    collectives.register()
    return group


def process_group(group: Group) -> dist.ProcessGroup:
    """The process group of ``torch.distributed`` behind ``group``."""
    return dist.distributed_c10d._resolve_process_group(group.name)


def _backend() -> str:
    npu = getattr(torch, "npu", None)
    return "cpu:gloo,npu:hccl" if npu is not None and npu.is_available() else "gloo"


def own_device() -> torch.device:
    """The card of this rank, or the CPU."""
    npu = getattr(torch, "npu", None)
    if npu is None or not npu.is_available():
        return torch.device("cpu")
    return torch.device("npu", config.local_rank() % npu.device_count())


def _use_own_device() -> None:
    """Make the card of this rank the current one, which ``npu`` without an index means."""
    device = own_device()
    if device.type == "npu":
        torch.npu.set_device(device)


@contextlib.contextmanager
def fail_together(group: Group) -> Iterator[None]:
    """Work that every rank does by itself; if it fails on one, it fails on all.

    Raises:
        ParallelError: On the ranks on which it worked, if it failed on another; says why.
    """
    reason = ""
    try:
        yield
    except PeerUnavailable:
        raise  # the others wait for the same rank, and find out by themselves
    except BaseException as fault:
        reason = f"{type(fault).__name__}: {fault}"
        _end_failed_together(group, reason)
        raise
    else:
        _end_failed_together(group, reason)


def _end_failed_together(group: Group, reason: str) -> None:
    """Tell the others why this rank has failed, or raise why another one has."""
    failed = [(rank, text) for rank, text in enumerate(all_gather_object(group, reason)) if text]
    if failed and not reason:
        rank, text = failed[0]
        raise ParallelError(f"rank {rank} has failed, and the others end with it. {text}")


def agree(group: Group, **facts: Any) -> None:
    """Compare ``facts`` over the ranks.

    Raises:
        ParallelError: On every rank, where they differ; says on which ranks, and how.
    """
    rendezvous.compare(list(range(group.size)), all_gather_object(group, facts))


def share_memory(group: Group) -> None:
    """Run collectives of CPU tensors through shared memory where all ranks are on one host."""
    ops = torch.ops.liteboost_parallel
    if not native.load().loaded or group.size == 1 or ops._shares_memory(group.name):
        return
    offers = all_gather_object(group, (host(), f"/liteboost-{secrets.token_hex(8)}"))
    if len({each for each, _ in offers}) > 1:
        return
    reason = ""
    try:
        ops._share_memory(
            group.name, offers[0][1], _SLOT_BYTES, rendezvous.COLLECTIVE_TIMEOUT.total_seconds()
        )
    except RuntimeError as fault:
        reason = str(fault).splitlines()[0]
    reasons = [each for each in all_gather_object(group, reason) if each]
    if reasons:
        ops._unshare_memory(group.name)
        report.note(f"Ranks of this host communicate by gloo and not by shared memory: {reasons[0]}.")


def all_gather_object(group: Group, value: Any) -> list[Any]:
    """The picklable ``value`` of each rank."""
    if group.size == 1:
        return [value]
    call_group = call_group_of(group)
    return call_group.all_gather_object(value, "" if call_group is world() else f"{world().call}.")


def communicate(group: Group, action: Callable[[], Any]) -> Any:
    """``action()``, which runs collectives of the process group of ``group``.

    Raises:
        ParallelError: A rank has ended, or does not come.
    """
    return call_group_of(group).communicate(action, group.name)
