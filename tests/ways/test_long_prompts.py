"""A prompt of 8,192 tokens takes memory in proportion to its length.

Not so with a sliding window, or padding: modeling files read the mask of a byte for each pair of positions
that transformers makes for them.
"""

from __future__ import annotations

from support import processes

#: Peak memory over that before, of two prompts, one twice as long as the other, as ours and as eager run
#: them: in a process whose peak can be set back.
SCRIPT = """
import json
from pathlib import Path
import torch
import liteboost_adaptor
from transformers import AutoModelForCausalLM, LlamaConfig

torch.set_num_threads(1)
config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
                     num_key_value_heads=2, vocab_size=64, max_position_embeddings=16384)

def kib(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

def peak(model, length):
    ids = torch.arange(length).remainder(64).view(1, length)
    Path("/proc/self/clear_refs").write_text("5")
    before = kib("VmRSS")
    with torch.no_grad():
        model(ids, use_cache=True, logits_to_keep=1)
    return kib("VmHWM") - before

def peaks(implementation, *lengths):
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    peak(model, 1024)
    return [peak(model, length) for length in lengths]

ours = peaks("sdpa", 4096, 8192)
with liteboost_adaptor.patched(level=0):
    print(json.dumps([ours, peaks("eager", 2048, 4096)]))
"""


def test_memory_of_a_prompt_grows_with_its_length() -> None:
    ours, eager = processes.python_json(SCRIPT, is_forked=True)
    # Scores of each head for each pair of positions would be 268 MB in 8 bits already.
    assert ours[1] < 2.5 * ours[0] and ours[1] < 100_000
    assert eager[1] > 3 * eager[0] and eager[1] > 250_000, "memory that grows with the square is not seen"
