"""Threads: an op runs on as many as torch is told, and in torch's own OpenMP runtime."""

from __future__ import annotations

import sys

import pytest
from support.processes import python_json

pytestmark = [
    pytest.mark.usefixtures("native_only"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads threads from /proc"),
]

CALLS = {
    "rms_norm": "ops.rms_norm(x, w, 1e-6)",
    "rope": "ops.rope(q, q, c, c)",
    "gated_activation": "ops.gated_activation(x, x)",
    "linear": "ops.linear(x[:1], x)",
    "attention": "ops.attention(q, q, q, None, 0.1)",
}

# Threads that have used processor time, counted after the op has run for a while and nothing else has.
COUNT = """
import json, os, sys, time, torch
from liteboost_adaptor import native
native.load()
ops = torch.ops.liteboost
torch.set_num_threads(1)  # so that making the arguments starts none
torch.set_grad_enabled(False)
def tasks():
    return set(os.listdir("/proc/self/task"))
x, w = torch.zeros(2048, 1024), torch.zeros(1024)
q, c = torch.zeros(1, 8, 512, 64), torch.zeros(1, 512, 64)
before = tasks()
torch.set_num_threads(int(sys.argv[2]))
end = time.monotonic() + 0.5
while time.monotonic() < end:
    eval(sys.argv[1])
pool = tasks() - before
def ticks(task):
    return sum(map(int, open(f"/proc/self/task/{task}/stat").read().rsplit(")", 1)[1].split()[11:13]))
busy = sum(ticks(task) > 0 for task in pool)
torch.mm(x, x.t())
paths = {line.split()[-1] for line in open("/proc/self/maps")}
runtimes = {path for path in paths if any(name in path for name in ("libgomp", "libiomp", "libomp"))}
print(json.dumps([len(pool), busy, len(tasks() - before), sorted(runtimes)]))
"""


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_op_uses_the_threads_of_torch(call: str, threads: int) -> None:
    pool, busy, after, runtimes = python_json(COUNT, call, str(threads), OMP_NUM_THREADS="8")
    # The calling thread is one of them. All of the pool have worked, and torch's own matrix product then
    # needs no further threads: it is the same pool.
    assert (pool, busy, after) == (threads - 1,) * 3
    assert len(runtimes) == 1, f"a second OpenMP runtime was loaded: {runtimes}"


def test_small_work_stays_on_one_thread() -> None:
    calls = [
        "ops.rms_norm(x[:1], w, 1e-6)",
        "ops.gated_activation(x[:8], x[:8])",
        "ops.rope(q[:, :, :1], q[:, :, :1], c[:, :1], c[:, :1])",
    ]
    pool, *_ = python_json(COUNT, f"[{', '.join(calls)}]", "4", OMP_NUM_THREADS="8")
    assert pool == 0
