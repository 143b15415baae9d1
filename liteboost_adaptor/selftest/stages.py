"""What the full report runs behind the operators, each stage in a process of its own (see `kit`)."""

from __future__ import annotations

import importlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .. import native_npu
from . import families

#: How often a measurement is repeated.
ROUNDS = 5
#: Operators that launch nothing.
FREE = {"empty", "view", "as_strided", "reshape", "slice", "select", "expand", "transpose", "t", "unsqueeze"}


def main(stage: str, device: str, file: str) -> None:
    """Run a stage and write ``[passed, words]`` to a file.

    Args:
        stage: A key of `STAGES`, or ``family`` with a name behind it.
        device: ``"npu:0"`` and on.
        file: Where the outcome goes, as JSON.
    """
    importlib.import_module("torch_npu")
    torch.npu.set_device(device)
    status = native_npu.load()
    if status is None or not status.loaded:
        raise RuntimeError(status.sentence if status else "no NPU is found")
    name, _, of = stage.partition(" ")
    with torch.no_grad():
        outcome = families.examine(of, device) if name == "family" else STAGES[name](device)
    torch.npu.synchronize()
    Path(file).write_text(json.dumps(outcome), encoding="utf-8")


def capture(device: str) -> tuple[bool, str]:
    """A graph of two of our ops, captured once and replayed on other values."""
    ops = torch.ops.liteboost
    x = torch.randn(4, 256).to(device, torch.bfloat16)
    weight = torch.randn(256).to(device, torch.bfloat16)
    matrix = torch.randn(256, 256).to(device, torch.bfloat16)

    def step() -> torch.Tensor:
        return ops.linear(ops.rms_norm(x, weight, 1e-6), matrix, None)

    step()
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        captured = step()
    wrong = 0
    for _ in range(3):
        x.copy_(torch.randn(4, 256))
        graph.replay()
        torch.npu.synchronize()
        wrong += not torch.equal(captured.cpu(), step().cpu())
    return wrong == 0, f"{wrong} of 3 replays differ from the step" if wrong else "3 replays are the step"


def collectives(device: str) -> tuple[bool, str]:
    """All-reduce, all-gather and reduce-scatter of two processes, in fp32 and bf16."""
    import torch.distributed as dist

    dist.init_process_group("hccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    wrong = []
    for dtype in (torch.float32, torch.bfloat16):
        own = [(torch.arange(64) % 7 + each).to(dtype) for each in range(size)]  # sums are exact in bf16
        total = torch.stack(own).sum(0)
        x = own[rank].to(device)
        dist.all_reduce(x)
        gathered = torch.empty(64 * size, dtype=dtype, device=device)
        dist.all_gather_into_tensor(gathered, own[rank].to(device))
        part = torch.empty(64 // size, dtype=dtype, device=device)
        dist.reduce_scatter_tensor(part, own[rank].to(device))
        checks = {"all-reduce": (x, total), "all-gather": (gathered, torch.cat(own))}
        checks["reduce-scatter"] = part, total.chunk(size)[rank]
        wrong += [f"{name} in {dtype}" for name, (a, b) in checks.items() if not torch.equal(a.cpu(), b)]
    dist.destroy_process_group()
    return not wrong, f"wrong: {', '.join(wrong)}" if wrong else f"{size} processes, fp32 and bf16"


def launches(device: str) -> tuple[bool, str]:
    """Operators that torch dispatches in a decode step, without allocations and views."""
    return _at_levels(device, "operators a token", _dispatched)


def timed_step(device: str) -> tuple[bool, str]:
    """Milliseconds of a token of a small Llama in bf16."""
    return _at_levels(device, "ms a token", _milliseconds)


STAGES: dict[str, Callable[[str], tuple[bool, str]]] = {
    "capture": capture,
    "collectives": collectives,
    "launches": launches,
    "timed_step": timed_step,
}


def _at_levels(device: str, what: str, measure: Callable[[Any, str], float]) -> tuple[bool, str]:
    import liteboost_adaptor

    model = families.model_of("llama").to(device, torch.bfloat16)
    original = measure(model, device)
    liteboost_adaptor.apply(model, level=2)
    ours = measure(model, device)
    return True, f"{what}: {original:.1f} without us, {ours:.1f} at level 2 (Llama of 2 layers, bf16)"


def _milliseconds(model: Any, device: str) -> float:
    families.generated(model, device)  # which records a step
    seconds = []
    for _ in range(ROUNDS):
        before = time.perf_counter()
        families.generated(model, device)
        seconds.append(time.perf_counter() - before)
    return 1e3 * statistics.median(seconds) / families.NEW_TOKENS


def _dispatched(model: Any, device: str) -> float:
    from torch.profiler import ProfilerActivity, profile

    families.generated(model, device)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        families.generated(model, device)
    names = [event.name for event in found.events() if event.cpu_parent is None and "::" in event.name]
    return sum(name.split("::")[1] not in FREE for name in names) / families.NEW_TOKENS
