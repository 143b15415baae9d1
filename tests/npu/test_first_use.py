"""An op on an NPU is compared with its reference at its first use, whatever surrounds the call."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from liteboost_adaptor import config, native_npu
from liteboost_adaptor.ops import norm
from liteboost_adaptor.selftest import compare, facts, first_use
from liteboost_adaptor.selftest.case import cases_of


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory, and a process that has compared nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    status = native_npu.load()
    assert status is not None and status.loaded, status
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    torch.ops.liteboost._npu_forget_verdicts()
    torch.ops.liteboost._npu_forget_counts()


def answers(cache: Path) -> dict[str, str]:
    return {path.name: json.loads(path.read_text())["reason"] for path in cache.rglob("first_use/*/*.json")}


def run(dtype: torch.dtype = torch.bfloat16) -> None:
    """One call, and the same on the CPU in float64."""
    x, weight = torch.randn(2, 5, 64).to(dtype), torch.randn(64).to(dtype)
    result = torch.ops.liteboost.rms_norm(x.npu(), weight.npu(), 1e-6)
    exact = norm.rms_norm(x.double(), weight.double(), 1e-6)
    assert (result.cpu().double() - exact).abs().max() < 0.05


@torch.no_grad()
def test_compared_once_then_remembered(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run()
    run()
    assert native_npu.verdicts() == [("rms_norm", "bf16", "")]
    assert native_npu.calls() == [("rms_norm", "", 2)]
    assert answers(cache) == {"rms_norm-bf16.json": ""}
    # Another process would find the answer: nothing is compared again.
    forget()
    monkeypatch.setattr(first_use, "compare", None)
    run()
    assert native_npu.calls() == [("rms_norm", "", 1)]


@torch.no_grad()
def test_every_dtype_and_layout_is_compared_by_itself(cache: Path) -> None:
    for dtype in (torch.float32, torch.float16):
        run(dtype)
    x, weight = torch.ones(2, 32, device="npu"), torch.ones(32, device="npu")
    torch.ops.liteboost.rms_norm(x, weight, 1e-6, 1.0)
    assert set(answers(cache)) == {f"rms_norm-{kind}.json" for kind in ("fp32", "fp16", "fp32-offset")}


@torch.no_grad()
def test_answers_of_another_machine_do_not_count(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run()
    here = facts.identity()
    assert here["soc"].startswith("Ascend") and here["cann"] and here["operators"]
    for fact in ("soc", "cann", "torch_npu", "kernels", "operators"):
        monkeypatch.setattr(facts, "identity", lambda fact=fact: {**here, fact: "another"})
        forget()
        before = len(list(cache.rglob("first_use/*/*.json")))
        run()
        assert len(list(cache.rglob("first_use/*/*.json"))) == before + 1


@torch.no_grad()
def test_damaged_answer_is_made_again(cache: Path) -> None:
    run()
    (path,) = cache.rglob("first_use/*/*.json")
    whole = path.read_text()
    for text in ("", whole[:40], whole.replace('"reason": ""', '"reason": "made up"')):
        path.write_text(text)
        forget()
        run()
        assert path.read_text() == whole and native_npu.verdicts() == [("rms_norm", "bf16", "")]


class Counting(torch.overrides.TorchFunctionMode):
    seen = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        Counting.seen += 1
        return function(*args, **(kwargs or {}))


class CountingDispatch(TorchDispatchMode):
    seen = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        CountingDispatch.seen += 1
        return function(*args, **(kwargs or {}))


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "autocast of the NPU": lambda: torch.autocast("npu", dtype=torch.float16),
    "autocast of the CPU": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default device": lambda: torch.device("npu"),
    "default device meta": lambda: torch.device("meta"),
    "function mode": Counting,
    "dispatch mode": CountingDispatch,
    "side stream": lambda: torch.npu.stream(torch.npu.Stream()),
}


@pytest.mark.parametrize("name", SURROUNDINGS)
@torch.no_grad()
def test_surroundings_of_the_call_do_not_reach_the_comparison(cache: Path, name: str) -> None:
    x = torch.randn(2, 5, 64, dtype=torch.bfloat16).npu()
    weight = torch.randn(64, dtype=torch.bfloat16).npu()
    states = torch.get_rng_state(), torch.npu.get_rng_state()
    torch.npu.synchronize()
    Counting.seen = CountingDispatch.seen = 0
    with SURROUNDINGS[name]():
        torch.ops.liteboost.rms_norm(x, weight, 1e-6)
        # Within the op torch itself takes some modes away; asked directly, all of them are there.
        assert first_use.verdict("layer_norm", "bf16") == ""
    assert Counting.seen <= 5 and CountingDispatch.seen <= 5
    assert native_npu.verdicts() == [("rms_norm", "bf16", "")]
    assert torch.equal(states[0], torch.get_rng_state()) and torch.equal(states[1], torch.npu.get_rng_state())


@torch.no_grad()
def test_default_dtype_does_not_reach_the_comparison(cache: Path) -> None:
    torch.set_default_dtype(torch.float16)
    try:
        run()
    finally:
        torch.set_default_dtype(torch.float32)
    assert native_npu.verdicts() == [("rms_norm", "bf16", "")]


def test_threads_that_meet_the_op_together(cache: Path) -> None:
    with torch.no_grad():
        x, weight = torch.randn(3, 96).npu(), torch.ones(96).npu()
        expected = norm.rms_norm(x, weight, 1e-6).cpu()

    def call(_: int) -> torch.Tensor:
        with torch.inference_mode():
            return torch.ops.liteboost.rms_norm(x, weight, 1e-6).cpu()

    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(call, range(16)):
            torch.testing.assert_close(found, expected)
    assert native_npu.verdicts() == [("rms_norm", "fp32", "")]
    assert native_npu.calls() == [("rms_norm", "", 16)]


@torch.no_grad()
def test_wrong_operator_is_refused_and_its_reference_runs(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = compare._error
    monkeypatch.setattr(compare, "_error", lambda result, true: exact(result, true) + 0.5)
    monkeypatch.setitem(compare.ALLOWED, torch.bfloat16, 0.1)
    monkeypatch.setattr(compare, "OWN_FACTOR", 0.0)
    run()
    ((op, kind, reason),) = native_npu.verdicts()
    assert (op, kind) == ("rms_norm", "bf16") and reason.startswith(
        "differs from its reference (bf16) in 14 of 14"
    )
    assert "error 5.0" in reason and "allowed 1.00e-01" in reason
    assert native_npu.calls() == [("rms_norm", reason, 1)]
    assert answers(cache) == {"rms_norm-bf16.json": reason}
    status = native_npu.status()
    assert status.to_dict()["refused"] == [["rms_norm", "bf16", reason]]
    assert f"  rms_norm refused: {reason}" in status.lines()


@torch.no_grad()
def test_full_memory_refuses_for_this_process_alone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(op: str, kind: str, device: str) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(first_use, "compare", full)
    run()
    ((_, _, reason),) = native_npu.verdicts()
    assert reason.endswith("OutOfMemoryError: no memory left") and answers(cache) == {}


@torch.no_grad()
def test_nothing_is_compared_while_a_graph_is_captured(cache: Path) -> None:
    x, weight = torch.randn(3, 64).npu(), torch.ones(64).npu()
    expected = norm.rms_norm(x, weight, 1e-6).cpu()
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        captured = torch.ops.liteboost.rms_norm(x, weight, 1e-6)
    graph.replay()
    torch.npu.synchronize()
    torch.testing.assert_close(captured.cpu(), expected)
    assert answers(cache) == {} and native_npu.verdicts() == []
    ((_, reason, _),) = native_npu.calls()
    assert "before a graph was captured" in reason
    # Afterwards it is compared as ever.
    torch.testing.assert_close(torch.ops.liteboost.rms_norm(x, weight, 1e-6).cpu(), expected)
    assert native_npu.verdicts() == [("rms_norm", "fp32", "")]


@torch.no_grad()
def test_kinds_tell_bias_head_size_and_length(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def note(op: str, kind: str) -> str:
        asked.append(f"{op} {kind}")
        return "" if cases_of(op, kind) else "no cases"

    monkeypatch.setattr(first_use, "verdict", note)
    ops = torch.ops.liteboost
    weight, bias = (
        torch.randn(64, 64, dtype=torch.bfloat16).npu(),
        torch.zeros(64, dtype=torch.bfloat16).npu(),
    )
    ops.linear(weight, weight, None), ops.linear(weight, weight, bias)
    ops.layer_norm(weight, bias, bias, 1e-5), ops.layer_norm(weight, None, bias, 1e-5)
    ops.linear_w8a8(weight, weight.to(torch.int8), bias.float(), bias)
    for head, queries, keys in ((64, 1, 2048), (80, 1, 2049), (128, 3, 9)):
        query = torch.zeros(1, 2, queries, head, dtype=torch.bfloat16).npu()
        states = torch.zeros(1, 2, keys, head, dtype=torch.bfloat16).npu()
        ops.attention(query, states, states, None, 1.0, True)
    assert asked == [
        *("linear bf16", "linear bf16 bias", "layer_norm bf16 bias", "layer_norm bf16 weightless bias"),
        *("linear_w8a8 bf16 bias", "attention bf16 decode head-64", "attention bf16 decode head-80 long"),
        "attention bf16 prefill head-128",
    ]
    assert all(reason == "" for _, _, reason in native_npu.verdicts())


PROCESS = """
import torch, torch_npu
from liteboost_adaptor import native_npu
native_npu.load()
with torch.inference_mode():
    torch.ops.liteboost.rms_norm(torch.ones(2, 32).npu(), torch.ones(32).npu(), 1e-6)
print(native_npu.verdicts(), native_npu.calls())
"""


def test_processes_that_start_together_share_the_folder(cache: Path) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS],
            env=config.child_environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in started:
        out, _ = process.communicate(timeout=300)
        assert (
            process.returncode == 0
            and out.split("\n")[-2] == "[('rms_norm', 'fp32', '')] [('rms_norm', '', 1)]"
        )
    assert answers(cache) == {"rms_norm-fp32.json": ""}
