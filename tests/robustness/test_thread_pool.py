"""OpenMP's threads of a thread that waits are let go: beside them those of another do not spin."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import processes

if not Path("/proc/self/task").is_dir():
    pytest.skip("threads are counted in /proc", allow_module_level=True)

_BEGIN = """
import sys, time
from pathlib import Path
import torch

torch.set_num_threads(4)

def threads(most=None):
    # Those that are let go end by themselves.
    for _ in range(200):
        count = len(list(Path("/proc/self/task").iterdir()))
        if most is None or count <= most:
            break
        time.sleep(0.05)
    return count

def compute():
    before = threads()
    torch.ones(512, 512) @ torch.ones(512, 512)
    assert threads() > before, "no threads were made"
"""
_RELEASED = """
from liteboost_adaptor import thread_pool

before = threads()
compute()
thread_pool.release()
assert threads(before) <= before
compute()
"""
_BOUND = """
import liteboost_adaptor
from support import tiny_models

model = tiny_models.build("llama")
before = threads()
compute()
liteboost_adaptor.apply(model, level=2)
assert threads(before) <= before
"""
_BATCHED = """
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

import tqdm

tqdm.tqdm.monitor_interval = 0  # which would be a thread, too
at_start = []
original = ContinuousBatchingManager.start

def start(self):
    at_start.append(threads(before))
    return original(self)

ContinuousBatchingManager.start = start
warmup = ContinuousBatchingManager.warmup

def warmed_up(self):
    warmup(self)
    torch.ones(512, 512) @ torch.ones(512, 512)

ContinuousBatchingManager.warmup = warmed_up
compute()
model.generate_batch(
    [[5, 6, 7]],
    generation_config=GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=-1, pad_token_id=0),
    continuous_batching_config=ContinuousBatchingConfig(page_size=8, num_blocks=20),
)
assert at_start[0] <= before, (before, at_start)
"""


_SCRIPTS = {"asked for": _RELEASED, "a model is bound": _BOUND, "generate_batch": _BOUND + _BATCHED}


@pytest.mark.parametrize("what", _SCRIPTS)
def test_threads_of_this_thread_are_let_go(what: str) -> None:
    if what == "generate_batch":
        pytest.importorskip(
            "transformers.generation.continuous_batching.cache_allocators", exc_type=ImportError
        )
    assert processes.python_json(f"{_BEGIN}{_SCRIPTS[what]}print('true')", is_forked=True) is True
