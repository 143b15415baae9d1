"""Stages of ``selftest --device npu --report`` in this process; `test_kit.py` has them in their own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cann_sim.faults import wrong

from liteboost_adaptor import native_npu
from liteboost_adaptor.selftest import families, kit, stages

pytestmark = pytest.mark.usefixtures("undone")

Ran = Callable[[str], tuple[bool, str]]


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    """Run a stage; what it writes for `kit`."""

    def run(stage: str) -> tuple[bool, str]:
        stages.main(stage, "npu:0", str(tmp_path / "outcome.json"))
        passed, words = json.loads((tmp_path / "outcome.json").read_text())
        return passed, words

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return run


def test_a_captured_graph_is_the_step(ran: Ran) -> None:
    assert ran("capture") == (True, "3 replays are the step")


def test_a_graph_that_is_not_replayed_is_noticed(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.npu.NPUGraph, "replay", lambda graph: None)
    assert ran("capture") == (False, "3 of 3 replays differ from the step")


def test_operators_of_a_token_become_fewer(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "NEW_TOKENS", 12)
    passed, words = ran("launches")
    figures = re.fullmatch(
        r"operators a token: (\S+) without us, (\S+) at level 2 \(Llama of 2 layers, bf16\)", words
    )
    original, ours = map(float, figures.groups())
    assert passed and 0 < ours < original / 2


def test_a_token_is_timed_by_rounds_of_whole_texts(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(families, "generated", lambda model, device: made.append(device))
    monkeypatch.setattr(stages.time, "perf_counter", lambda: len(made) ** 2 * 0.008)
    passed, words = ran("timed_step")
    # Of each variant one text comes before the rounds, and the median round is the third.
    assert passed and made == ["npu:0"] * 2 * (1 + stages.ROUNDS)
    milliseconds = [(at**2 - (at - 1) ** 2) * 8 / families.NEW_TOKENS for at in (4, 10)]
    assert words.startswith("ms a token: {:.1f} without us, {:.1f} at level 2".format(*milliseconds))


@pytest.mark.parametrize("family", ["qwen3", "opt"])
def test_a_family_computes_what_the_cpu_computes(ran: Ran, family: str) -> None:
    passed, words = ran(f"family {family}")
    assert passed and "all tokens the CPU's; bf16 error " in words


def test_a_family_on_a_wrong_operator_fails(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "NEW_TOKENS", 2)
    with wrong("aclnnAdd"):
        passed, words = ran("family qwen3")
    assert not passed and re.search(r"fp32 error \S+e[+-]\d\d, ", words)


@pytest.mark.parametrize("is_right", [True, False])
def test_collectives_are_exact(ran: Ran, monkeypatch: pytest.MonkeyPatch, is_right: bool) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(kit._free_port()), "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    if not is_right:
        monkeypatch.setattr(dist, "reduce_scatter_tensor", lambda part, x: part.zero_())
    wrong_ones = "wrong: reduce-scatter in torch.float32, reduce-scatter in torch.bfloat16"
    assert ran("collectives") == (is_right, "1 processes, fp32 and bf16" if is_right else wrong_ones)
    assert not dist.is_initialized()


def test_a_stage_without_kernels_says_why(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_npu, "load", lambda: None)
    with pytest.raises(RuntimeError, match="no NPU is found"):
        ran("capture")
