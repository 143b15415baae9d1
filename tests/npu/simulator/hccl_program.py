"""Run by test_hccl.py in every rank: each collective against what the ranks know of each other."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from cann_sim.trace import recording
from npu.simulator.ctypes_acl import error_message

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = f"npu:{RANK}"
SUM = sum(range(1, RANKS + 1))


def filled(value: float, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, value, device=DEVICE).to(dtype)


def reductions() -> None:
    for op, wanted in (
        (dist.ReduceOp.SUM, SUM),
        (dist.ReduceOp.MAX, RANKS),
        (dist.ReduceOp.AVG, SUM / RANKS),
    ):
        x = filled(RANK + 1, 5)
        dist.all_reduce(x, op=op)
        assert x.tolist() == [wanted] * 5, op
    for dtype in (torch.float16, torch.bfloat16, torch.int32, torch.int64):
        x = filled(RANK + 1, 7, dtype=dtype)
        dist.all_reduce(x)
        assert x.tolist() == [SUM] * 7, dtype
    large = [torch.randn(300_001, generator=torch.Generator().manual_seed(k)) for k in range(RANKS)]
    x = large[RANK].to(DEVICE)
    dist.all_reduce(x)
    torch.testing.assert_close(x.cpu(), sum(large))
    piece = torch.empty(4, device=DEVICE)
    dist.reduce_scatter_tensor(piece, torch.arange(4.0 * RANKS, device=DEVICE) * (RANK + 1))
    assert torch.equal(piece.cpu(), torch.arange(4.0 * RANKS)[4 * RANK : 4 * RANK + 4] * SUM)


def gathers_and_messages() -> None:
    every = torch.empty(2 * RANKS, device=DEVICE)
    dist.all_gather_into_tensor(every, filled(RANK, 2))
    assert every.tolist() == [float(k) for k in range(RANKS) for _ in range(2)]
    x = filled(RANK, 3)
    dist.broadcast(x, src=1)
    assert x.tolist() == [1.0] * 3
    swapped = torch.empty(RANKS, device=DEVICE)
    dist.all_to_all_single(swapped, torch.arange(float(RANKS), device=DEVICE) + 10 * RANK)
    assert swapped.tolist() == [10.0 * k + RANK for k in range(RANKS)]
    if RANK == 0:
        dist.send(filled(42, 3), 1)
    elif RANK == 1:
        received = torch.empty(3, device=DEVICE)
        dist.recv(received, 0)
        assert received.tolist() == [42.0] * 3
    names: list[object] = [None] * RANKS
    dist.all_gather_object(names, {"rank": RANK})
    assert names == [{"rank": k} for k in range(RANKS)]


def traced() -> None:
    x = filled(1, 4)
    with recording() as trace:
        dist.all_reduce(x)
    (event,) = trace.of("collective")
    assert (event.fields["op"], event.fields["bytes"], event.fields["ranks"]) == ("HcclAllReduce", 16, RANKS)


def captured() -> None:
    """A sum and a gather in a graph: made by every replay, of what lies there then, not by the capture."""
    x, total, every = filled(0, 4), filled(0, 4), filled(0, 4 * RANKS)
    graph = torch.npu.NPUGraph()
    torch.npu.synchronize()
    with recording() as trace, torch.npu.graph(graph):
        total.copy_(x)
        dist.all_reduce(total)
        dist.all_gather_into_tensor(every, total)
        after = total + 1
    assert not trace.of("collective")
    for turn in (1, 2):
        x.fill_(turn * (RANK + 1))
        with recording() as trace:
            graph.replay()
        assert after.tolist() == [turn * SUM + 1.0] * 4 and every.tolist() == [turn * SUM] * 4 * RANKS
        assert [event.fields["op"] for event in trace.of("collective")] == ["HcclAllReduce", "HcclAllGather"]
        assert all(event.fields["graph"] for event in trace.of("collective"))
    for refused, why in ((in_a_task_group, "a collective in a task group"), (sent, "is not simulated")):
        try:
            with torch.npu.graph(torch.npu.NPUGraph()):
                refused(x)
        except RuntimeError as raised:
            assert why in f"{raised} {error_message()}", raised
        else:
            raise AssertionError(why)


def in_a_task_group(x: torch.Tensor) -> None:
    stream = torch.npu.current_stream()
    torch.npu.graph_task_group_begin(stream)
    try:
        dist.all_reduce(x)
    finally:
        torch.npu.graph_task_group_end(stream)


def sent(x: torch.Tensor) -> None:
    dist.all_to_all_single(torch.empty_like(x), x)


def main() -> None:
    torch.npu.set_device(RANK)
    dist.init_process_group("hccl")
    for part in (reductions, gathers_and_messages, traced, captured):
        part()
        dist.barrier()
    torch.npu.synchronize()
    sys.stdout.write(f"rank {RANK} ok\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
