"""The process group of the ranks, and what they agree on before they work together."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .. import config, native
from ..errors import ParallelError
from ..ops import collectives
from ..report import report
from . import starts

#: Of shared memory, for each rank and once more; longer tensors go through it piece by piece.
_SLOT_BYTES = 1 << 20
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True)
class Group:
    """Ranks that share one model.

    Attributes:
        name: Under which the collectives find the process group.
    """

    name: str
    rank: int
    size: int


def join() -> Group:
    """The group of all processes; started by the variables that ``torchrun`` sets, unless it runs.

    Raises:
        ParallelError: There is no process group, and no launcher has said how to make one; or as
            `starts.make_process_group` says.
    """
    if not dist.is_available():
        raise ParallelError("this torch is built without torch.distributed, which several processes need")
    if not dist.is_initialized():
        if config.launched() is None:
            raise ParallelError(
                "a model is divided over the processes of a launcher, and none has started this one (RANK, "
                "WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not all set). Start it with "
                "`torchrun --nproc-per-node=N`, or call torch.distributed.init_process_group first."
            )
        _use_own_device()
        starts.make_process_group(_backend())
    default = dist.distributed_c10d._get_default_group()
    group = Group(default.group_name, dist.get_rank(), dist.get_world_size())
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
    except BaseException as fault:
        reason = f"{type(fault).__name__}: {fault}"
        raise
    finally:
        failed = [(rank, text) for rank, text in enumerate(gathered(group, reason)) if text]
        if failed and not reason:
            rank, text = failed[0]
            raise ParallelError(f"rank {rank} has failed, and the others end with it. {text}")


def agree(group: Group, **facts: Any) -> None:
    """Compare ``facts`` over the ranks.

    Raises:
        ParallelError: On every rank, where they differ; says on which ranks, and how.
    """
    starts.compare(list(range(group.size)), gathered(group, facts))


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
        ops._share_memory(group.name, offers[0][1], _SLOT_BYTES, starts.PATIENCE.total_seconds())
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
    found: list[Any] = [None] * group.size
    with talking(group):
        dist.all_gather_object(found, value, group=process_group(group))
    return found


@contextlib.contextmanager
def talking(group: Group) -> Iterator[None]:
    """Say what it means when the process group fails while ranks talk.

    Raises:
        ParallelError: A rank has ended, or has not come in time.
    """
    try:
        yield
    except RuntimeError as fault:
        raise ParallelError(
            f"rank {group.rank} of {group.size} waited for the others, and one has ended or does something "
            f"else; its own output says why ({str(fault).splitlines()[0]})"
        ) from fault


def host() -> str:
    """What only processes that see the same /dev/shm and the same process numbers have in common."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            boot = file.read().strip()
        shared, processes = os.stat("/dev/shm"), os.stat("/proc/self/ns/pid")
    except OSError as fault:
        return f"unknown ({fault}) {secrets.token_hex(8)}"
    return f"{boot} {shared.st_dev}:{shared.st_ino} {processes.st_ino}"
