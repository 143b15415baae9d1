"""The process group of the ranks, and what they agree on before they work together."""

from __future__ import annotations

import datetime
import os
import secrets
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .. import config, native
from ..errors import ParallelError
from ..ops import collectives
from ..report import report

#: How long a rank waits for one that is alive; one that has ended is noticed at once.
_PATIENCE = datetime.timedelta(minutes=10)
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
        ParallelError: There is no process group, and no launcher has said how to make one.
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
        dist.init_process_group(_backend(), timeout=_PATIENCE)
    default = dist.distributed_c10d._get_default_group()
    group = Group(default.group_name, dist.get_rank(), dist.get_world_size())
    if (
        native.load().loaded
        and group.size > 1
        and not torch.ops.liteboost_parallel._shares_memory(group.name)
    ):
        _share_memory(group)
    collectives.register()
    return group


def process_group(group: Group) -> dist.ProcessGroup:
    """The process group of ``torch.distributed`` behind ``group``."""
    return dist.distributed_c10d._resolve_process_group(group.name)


def _backend() -> str:
    npu = getattr(torch, "npu", None)
    return "cpu:gloo,npu:hccl" if npu is not None and npu.is_available() else "gloo"


def agree(group: Group, **facts: Any) -> None:
    """Compare ``facts`` over the ranks.

    Raises:
        ParallelError: On every rank, where they differ; says on which ranks, and how.
    """
    found = _gathered(group, facts)
    for name in facts:
        values = [each.get(name) for each in found]
        if any(value != values[0] for value in values):
            ranks = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise ParallelError(
                f"the ranks have been started with different {name.replace('_', ' ')} ({ranks}). Start every "
                "rank with the same program, model and settings."
            )


def _share_memory(group: Group) -> None:
    """Let tensors of the CPU go through memory where all ranks are on one host; a note says why not."""
    ops = torch.ops.liteboost_parallel
    offers = _gathered(group, (_host(), f"/liteboost-{secrets.token_hex(8)}"))
    if len({host for host, _ in offers}) > 1:
        return
    reason = ""
    try:
        ops._share_memory(group.name, offers[0][1], _SLOT_BYTES, _PATIENCE.total_seconds())
    except RuntimeError as fault:
        reason = str(fault).splitlines()[0]
    reasons = [each for each in _gathered(group, reason) if each]
    if reasons:
        ops._unshare_memory(group.name)
        report.note(f"Ranks of this host exchange tensors by gloo and not by shared memory: {reasons[0]}.")


def _gathered(group: Group, value: Any) -> list[Any]:
    found: list[Any] = [None] * group.size
    dist.all_gather_object(found, value, group=process_group(group))
    return found


def _host() -> str:
    """What only processes that see the same /dev/shm and the same process numbers have in common."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            boot = file.read().strip()
        shared, processes = os.stat("/dev/shm"), os.stat("/proc/self/ns/pid")
    except OSError as fault:
        return f"unknown ({fault}) {secrets.token_hex(8)}"
    return f"{boot} {shared.st_dev}:{shared.st_ino} {processes.st_ino}"
