"""Collectives of torch.distributed over the simulator's libhccl, two ranks."""

from __future__ import annotations

from pathlib import Path

from npu.launching import without_torchrun

PROGRAM = Path(__file__).parent / "hccl_program.py"


def test_two_ranks_agree() -> None:
    lines = without_torchrun(2, PROGRAM, timeout=300)
    assert sorted(line for line in lines if line.startswith("rank")) == ["rank 0 ok", "rank 1 ok"]
