"""Threads: an op runs on as many as torch is told, and in torch's own OpenMP runtime."""

from __future__ import annotations

import json
import sys

import pytest
from support.processes import python_json

pytestmark = [
    pytest.mark.usefixtures("native_only"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads threads from /proc"),
]

LARGE = {
    "rms_norm": "ops.rms_norm(x, w, 1e-6)",
    "rope": "ops.rope(q, q, c, c)",
    "gated_activation": "ops.gated_activation(x, x)",
    "linear": "ops.linear(x[:1], x)",
    "attention": "ops.attention(q, q, q, None, 0.1)",
    "block_sparse_attention": "ops.block_sparse_attention(q, q, q, z, z[..., 0] + 1, [64, 512], 0.1)",
    "paged_attention": "ops.paged_attention(p, k, k, e, e, t, 0.1)",
    "recurrent_gated_delta_rule": "ops.recurrent_gated_delta_rule(h, h, h, r, r, s, scaling=0.1)",
    "chunk_gated_delta_rule": "ops.chunk_gated_delta_rule(h, h, h, r, r, scaling=0.1)",
}
SMALL = {
    "rms_norm": "ops.rms_norm(x[:1], w, 1e-6)",
    "rope": "ops.rope(q[:, :, :1], q[:, :, :1], c[:, :1], c[:, :1])",
    "gated_activation": "ops.gated_activation(x[:8], x[:8])",
}

# For each call: how many threads were started, and how many of those did its work.
COUNT = """
import json, os, sys, time, torch
from liteboost_adaptor import native
native.load()
ops = torch.ops.liteboost
torch.set_num_threads(1)  # so that making the arguments starts none
torch.set_grad_enabled(False)
x, w = torch.zeros(2048, 1024), torch.zeros(1024)
q, c = torch.zeros(1, 8, 512, 64), torch.zeros(1, 512, 64)
p, k = torch.zeros(1024, 8, 64), torch.zeros(64, 16, 8, 64)
e, t = torch.tensor([0, 512, 1024]), torch.arange(64).view(2, 32)
h, r, s = torch.zeros(1, 64, 8, 64), torch.zeros(1, 64, 8), torch.zeros(1, 8, 64, 64)
z = torch.zeros(8, 8, 1, dtype=torch.int64)

def tasks():
    return set(os.listdir("/proc/self/task"))

def ticks(task):
    with open(f"/proc/self/task/{task}/stat") as file:
        return sum(map(int, file.read().rsplit(")", 1)[1].split()[11:13]))

before = tasks()
torch.set_num_threads(int(sys.argv[2]))
result = {}
for name, call in json.loads(sys.argv[1]).items():
    time.sleep(0.1)  # threads that wait for work spin for a while
    start = {task: ticks(task) for task in tasks() - before}
    begin = time.process_time()  # what others run beside it takes none of it
    while True:
        eval(call)
        pool = tasks() - before
        # More than a few hundredths of a second each: that is work, not the end of a wait.
        busy = sum(ticks(task) - start.get(task, 0) > 3 for task in pool)
        if busy == int(sys.argv[2]) - 1 or time.process_time() > begin + float(sys.argv[3]):
            break
    result[name] = [len(pool), busy]
torch.mm(x, x.t())
result["afterwards"] = len(tasks() - before)
paths = {line.split()[-1] for line in open("/proc/self/maps")}
names = ("libgomp", "libiomp", "libomp")
result["runtimes"] = [path for path in paths if any(name in path for name in names)]
print(json.dumps(result))
"""


def count(calls: dict[str, str], threads: int, seconds: float) -> dict:
    return python_json(COUNT, json.dumps(calls), str(threads), str(seconds), OMP_NUM_THREADS="8")


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_ops_use_the_threads_of_torch(threads: int) -> None:
    found = count(LARGE, threads, seconds=20)
    runtimes = found.pop("runtimes")
    assert len(runtimes) == 1, f"a second OpenMP runtime was loaded: {runtimes}"
    # Torch's own matrix product needs no threads beyond them: it is the same pool.
    assert found.pop("afterwards") == threads - 1
    # The calling thread is one of the threads, and not in these numbers.
    assert found == {name: [threads - 1, threads - 1] for name in LARGE}


def test_small_work_stays_on_one_thread() -> None:
    found = count(SMALL, 4, seconds=0.2)
    assert {name: found[name] for name in SMALL} == {name: [0, 0] for name in SMALL}
