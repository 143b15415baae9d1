"""Small calls are not shared with threads that sleep while they wait, and give the same bits."""

from __future__ import annotations

import functools
import json

import pytest
from support import processes

CHILD = """
import hashlib, json, multiprocessing, os, sys
import torch
from liteboost_adaptor import native
native.load()
ops = torch.ops.liteboost
torch.set_grad_enabled(False)
torch.set_num_threads(2)


def started_and_bits(sizes):
    rows, outputs, inputs = sizes
    made = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inputs, generator=made)
    weight = torch.randn(outputs, inputs, generator=made)
    ops.linear(x[:1], weight[:8], None)
    before = len(os.listdir("/proc/self/task"))
    found = ops.linear(x, weight, None)
    found = ops.rms_norm(found, torch.ones(outputs), 1e-6)
    started = len(os.listdir("/proc/self/task")) - before
    return started, hashlib.sha256(found.numpy().tobytes()).hexdigest()


# Nothing has started a thread here: each child is the first to do so.
with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
    print(json.dumps(pool.map(started_and_bits, json.loads(sys.argv[1]), chunksize=1)))
"""
#: Rows, outputs and inputs, and how many threads calls of these sizes wake.
SIZES = {(1, 2048, 128): 0, (24, 344, 128): 0, (1, 8192, 512): 1, (4, 4096, 1024): 1}


@functools.cache
def threads_and_bits(policy: str) -> dict[tuple[int, ...], tuple[int, str]]:
    """How many threads calls of each of `SIZES` start, and what they give; ``policy`` may be empty."""
    variables = {"OMP_WAIT_POLICY": policy} if policy else {}
    found = processes.python_json(CHILD, json.dumps([*SIZES]), OMP_NUM_THREADS="2", **variables)
    return dict(zip(SIZES, map(tuple, found), strict=True))


@pytest.mark.parametrize("sizes", SIZES)
def test_a_sleeping_thread_is_woken_for_more(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    spinning, bits = threads_and_bits("")[sizes]
    assert spinning == 1
    assert threads_and_bits("passive")[sizes] == (SIZES[sizes], bits)
    assert threads_and_bits("PASSIVE")[sizes] == (SIZES[sizes], bits)
    assert threads_and_bits("active")[sizes] == (1, bits)
