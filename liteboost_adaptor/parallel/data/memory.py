"""Whether a process has room for the whole of a model that it holds a part of."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ... import config
from ..tensor.plan import Plan

_GROUP = Path("/sys/fs/cgroup")


def why_not_held(model: nn.Module, plan: Plan) -> str:
    """Why this process cannot hold ``model`` whole, or an empty string. All of its host are asked at once."""
    held = sum(each.nbytes for each in {id(each): each for each in _tensors(model)}.values())
    needed = held * plan.world_size  # from above: some of it is whole already
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
    """Bytes that processes of this host, or of its control group, may still have; None where nobody says."""
    found = [_of_host(), _of_group()]
    known = [each for each in found if each is not None]
    return min(known) if known else None


def _of_host() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _of_group() -> int | None:
    try:
        limit = (_GROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((_GROUP / "memory.current").read_text(encoding="ascii"))
        lines = (_GROUP / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    files = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
    return None if limit == "max" else int(limit) - used + files
