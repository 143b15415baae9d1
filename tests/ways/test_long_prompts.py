"""A prompt of 8,192 tokens takes memory in proportion to its length.

Not so with a sliding window, or padding: modeling files read the mask of a byte for each pair of positions
that transformers makes for them.
"""

from __future__ import annotations

from support import processes

#: Peak memory over that before, of prompts of two lengths, in a process whose peak can be set back.
SCRIPT = """
import json, sys
from pathlib import Path
import torch
import liteboost_adaptor
from transformers import AutoModelForCausalLM, LlamaConfig

torch.set_num_threads(1)
config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
                     num_key_value_heads=2, vocab_size=64, max_position_embeddings=16384)
model = AutoModelForCausalLM.from_config(config, attn_implementation=sys.argv[1]).eval()

def kib(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

def peak(length):
    ids = torch.arange(length).remainder(64).view(1, length)
    Path("/proc/self/clear_refs").write_text("5")
    before = kib("VmRSS")
    with torch.no_grad():
        model(ids, use_cache=True, logits_to_keep=1)
    return kib("VmHWM") - before

peak(1024)
print(json.dumps([peak(4096), peak(8192)]))
"""


def test_memory_of_a_prompt_grows_with_its_length() -> None:
    shorter, longer = processes.python_json(SCRIPT, "sdpa")
    # Scores of each head for each pair of positions would be 268 MB in 8 bits already.
    assert longer < 2.5 * shorter and longer < 100_000


def test_memory_that_grows_with_the_square_is_seen() -> None:
    shorter, longer = processes.python_json(SCRIPT, "eager", LITEBOOST_LEVEL="0")
    assert longer > 3 * shorter and longer > 1_000_000
