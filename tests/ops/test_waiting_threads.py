"""Small calls are not shared with threads that sleep while they wait, and give the same bits."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CHILD = """
import hashlib, os, sys
import torch
from liteboost_adaptor import native
native.load()
ops = torch.ops.liteboost
torch.set_grad_enabled(False)
torch.set_num_threads(2)
rows, outputs, inputs = map(int, sys.argv[1:])
made = torch.Generator().manual_seed(0)
x = torch.randn(rows, inputs, generator=made)
weight = torch.randn(outputs, inputs, generator=made)
ops.linear(x[:1], weight[:8], None)
before = len(os.listdir("/proc/self/task"))
found = ops.linear(x, weight, None)
found = ops.rms_norm(found, torch.ones(outputs), 1e-6)
print(len(os.listdir("/proc/self/task")) - before, hashlib.sha256(found.numpy().tobytes()).hexdigest())
"""


def threads_and_bits(policy: str | None, *sizes: int) -> tuple[int, str]:
    """How many threads calls of these sizes start, and what they give."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    if policy is not None:
        environment["OMP_WAIT_POLICY"] = policy
    command = [sys.executable, "-c", CHILD, *map(str, sizes)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    started, bits = done.stdout.split()
    return int(started), bits


@pytest.mark.parametrize(
    ("sizes", "asleep"), [((1, 2048, 128), 0), ((24, 344, 128), 0), ((1, 8192, 512), 1), ((4, 4096, 1024), 1)]
)
def test_a_sleeping_thread_is_woken_for_more(sizes: tuple[int, ...], asleep: int) -> None:
    spinning, bits = threads_and_bits(None, *sizes)
    assert spinning == 1
    assert threads_and_bits("passive", *sizes) == (asleep, bits)
    assert threads_and_bits("PASSIVE", *sizes) == (asleep, bits)
    assert threads_and_bits("active", *sizes) == (1, bits)
