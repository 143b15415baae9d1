"""Every family sharded over NPUs, on the simulator's hccl, computes what its original does in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from npu.launching import run_ranks
from support import families

PROGRAM = "ranks_families.py"
#: In the first tier: fused qkv, biases, experts, latent attention, sinks, norms over all heads, and two that
#: have no plan of their own.
SAMPLE = ("phi3", "qwen2", "qwen3_moe", "deepseek_v3", "gemma3_text", "gpt_oss", "olmo2", "gpt2", "falcon")
#: Its hash draws random projections on the device: no two runs are alike.
NOT_COMPARABLE = ("reformer",)


def check(results: list[dict[str, Any]], names: tuple[str, ...]) -> None:
    for rank, result in enumerate(results):
        assert set(result) == set(names)
        wrong = {
            name: each
            for name, each in result.items()
            if "fault" in each
            or not each["same_tokens"]
            or not each["distance"] <= 1e-5
            or each["devices"] != [f"npu:{rank}"]
            or each["distance"] != results[0][name]["distance"]  # the same bits on every rank
        }
        assert not wrong


def test_families_on_two_ranks(tmp_path: Path) -> None:
    results = run_ranks(2, PROGRAM, SAMPLE, tmp_path)
    check(results, SAMPLE)
    assert results[0]["phi3"]["held"] < 0.51


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
def test_every_family(size: int, tmp_path: Path) -> None:
    names = tuple(
        name
        for name in families.buildable()
        if size in families.world_sizes(name) and name not in NOT_COMPARABLE
    )
    assert len(names) > 150
    check(run_ranks(size, PROGRAM, names, tmp_path), names)
