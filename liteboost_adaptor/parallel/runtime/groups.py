"""The process group of the ranks, and what they agree on before they work together."""

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
from .call_group import Circle, Waited
from .host_processes import host

#: Of shared memory, for each rank and once more; longer tensors go through it piece by piece.
_SLOT_BYTES = 1 << 20


@dataclass(frozen=True)
class Group:
    """Ranks that share one model.

    Attributes:
        name: Under which the collectives find the process group.
    """

    name: str
    rank: int
    size: int


#: The circles of this process, by the names of their process groups; that of all ranks has `_WORLD`, too.
_circles: dict[str, Circle] = {}
_WORLD = "all"


@dataclass
class Ways:
    """Whether the ranks go their own ways from now on: each process works for itself, on whole models.

    Attributes:
        reason: Why; empty as long as they work together.
    """

    reason: str = ""


ways = Ways()


def world() -> Circle:
    """All ranks, who may not have a process group yet.

    Raises:
        ParallelError: Rank 0, which serves what they meet by, has not come.
    """
    circle = _circles.get(_WORLD)
    if circle is None:
        here = heartbeat.of_process(lambda: heartbeat.Board(rendezvous.store().clone()))
        circle = _circles[_WORLD] = Circle(here, _WORLD, list(range(here.size)))
        heartbeat.look_after(circle.look)
    return circle


def circle_of(group: Group) -> Circle:
    """The ranks of ``group``."""
    return _circles[group.name]


def has_met() -> bool:
    """Whether this rank talks to others."""
    return _WORLD in _circles


def note_group(group: Group, members: list[int]) -> None:
    """Keep what the ranks ``members`` of ``group`` talk by."""
    circle = world()
    if len(members) == len(circle.members):
        _circles[group.name] = circle
    elif group.name not in _circles:
        _circles[group.name] = Circle(circle.presence, group.name, members)
        heartbeat.look_after(_circles[group.name].look)
    _circles[group.name].groups[group.name] = members
    circle.groups[group.name] = members


def join() -> Group:
    """The group of all processes; started by the variables that ``torchrun`` sets, unless it runs.

    Raises:
        ParallelError: There is no process group, and no launcher has said how to make one; or a rank does
            not come.
    """
    if not dist.is_available():
        raise ParallelError("this torch is built without torch.distributed, which several processes need")
    circle = world()
    if not dist.is_initialized():
        _use_own_device()
        circle.gathered("process group")  # who waits for missing ones here says which
        circle.talk(lambda: rendezvous.make_process_group(_backend()), _WORLD)
    default = dist.distributed_c10d._get_default_group()
    group = Group(default.group_name, dist.get_rank(), dist.get_world_size())
    note_group(group, circle.members)
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
    """Let ``npu`` without a number mean the card of this rank."""
    device = own_device()
    if device.type == "npu":
        torch.npu.set_device(device)


@contextlib.contextmanager
def together(group: Group) -> Iterator[None]:
    """What every rank does by itself, where none goes on if one fails.

    Raises:
        ParallelError: On the ranks on which it worked, if it failed on another; says why.
    """
    reason = ""
    try:
        yield
    except Waited:
        raise  # the others wait for the same rank, and find it out by themselves
    except BaseException as fault:
        reason = f"{type(fault).__name__}: {fault}"
        _end_together(group, reason)
        raise
    else:
        _end_together(group, reason)


def _end_together(group: Group, reason: str) -> None:
    """Tell the others why this rank has failed, or raise why another one has."""
    failed = [(rank, text) for rank, text in enumerate(gathered(group, reason)) if text]
    if failed and not reason:
        rank, text = failed[0]
        raise ParallelError(f"rank {rank} has failed, and the others end with it. {text}")


def agree(group: Group, **facts: Any) -> None:
    """Compare ``facts`` over the ranks.

    Raises:
        ParallelError: On every rank, where they differ; says on which ranks, and how.
    """
    rendezvous.compare(list(range(group.size)), gathered(group, facts))


def share_memory(group: Group) -> None:
    """Let tensors of the CPU go through memory where all ranks are on one host; a note says why not."""
    ops = torch.ops.liteboost_parallel
    if not native.load().loaded or group.size == 1 or ops._shares_memory(group.name):
        return
    offers = gathered(group, (host(), f"/liteboost-{secrets.token_hex(8)}"))
    if len({each for each, _ in offers}) > 1:
        return
    reason = ""
    try:
        ops._share_memory(group.name, offers[0][1], _SLOT_BYTES, rendezvous.PATIENCE.total_seconds())
    except RuntimeError as fault:
        reason = str(fault).splitlines()[0]
    reasons = [each for each in gathered(group, reason) if each]
    if reasons:
        ops._unshare_memory(group.name)
        report.note(f"Ranks of this host exchange tensors by gloo and not by shared memory: {reasons[0]}.")


def gathered(group: Group, value: Any) -> list[Any]:
    """What each rank has for ``value``, which can be pickled."""
    if group.size == 1:
        return [value]
    circle = circle_of(group)
    return circle.gathered(value, "" if circle is world() else f"{world().call}.")


def talk(group: Group, action: Callable[[], Any]) -> Any:
    """``action()``, which exchanges tensors by the process group of ``group``.

    Raises:
        ParallelError: A rank has ended, or does not come.
    """
    return circle_of(group).talk(action, group.name)
