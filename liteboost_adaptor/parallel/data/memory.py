"""Whether the unsharded model fits into memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ... import config
from ..tensor.plan import ShardingPlan

_GROUP = Path("/sys/fs/cgroup")


def why_does_not_fit(model: nn.Module, plan: ShardingPlan) -> str:
    """Why this process cannot hold ``model`` unsharded, or an empty string. All of its host count."""
    held = sum(each.nbytes for each in {id(each): each for each in _tensors(model)}.values())
    needed = held * plan.world_size  # an upper bound: some of it is replicated
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    if device.type == "npu":
        free, where = torch.npu.mem_get_info(device)[0], str(device)
    else:
        needed, where = needed * config.local_size(), "this host"
        found = free_memory()
        if found is None:
            return ""
        free = found
    if needed <= free:
        return ""
    return f"whole it takes up to {needed / 1e9:.1f} GB, and {where} has {free / 1e9:.1f} GB left"


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def free_memory() -> int | None:
    """Available bytes of this host, or of its control group; None where unknown."""
    found = [_host_memory(), _cgroup_memory()]
    known = [each for each in found if each is not None]
    return min(known) if known else None


def _host_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _cgroup_memory() -> int | None:
    try:
        limit = (_GROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((_GROUP / "memory.current").read_text(encoding="ascii"))
        lines = (_GROUP / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    files = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
    return None if limit == "max" else int(limit) - used + files
