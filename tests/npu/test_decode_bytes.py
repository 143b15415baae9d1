"""Bytes that a decode step moves, and those that it must: each weight once, keys and values that count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cann_sim.trace import recording
from support import llamas

import liteboost_adaptor

pytestmark = pytest.mark.usefixtures("no_grad", "undone")

LAYERS, BATCH, STEPS = 4, 4, 3
SIZES = {"num_hidden_layers": LAYERS, "intermediate_size": 512, "vocab_size": 512}


def bytes_of_steps(model: Any, prompt: int, count: int) -> int:
    """Of ``count`` new tokens behind a batch of prompts of ``prompt`` with padding on their left."""
    ids = torch.randint(3, 512, (BATCH, prompt), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row in range(BATCH):
        mask[row, : 7 * row] = 0
    options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": count}
    with recording() as recorded:
        model.generate(input_ids=ids.npu(), attention_mask=mask.npu(), **options)
    return sum(launch.read + launch.written for launch in recorded.launches)


@pytest.mark.parametrize("prompt", [250, pytest.param(1500, marks=pytest.mark.full)])
def test_decode_of_a_padded_batch_copies_no_cache(prompt: int) -> None:
    model = llamas.llama(torch.bfloat16, pad_token_id=0, **llamas.WIDE | SIZES)
    liteboost_adaptor.apply(model, level=2)
    bytes_of_steps(model, prompt, 2 + STEPS)  # compared, recorded
    moved = (bytes_of_steps(model, prompt, 2 + STEPS) - bytes_of_steps(model, prompt, 2)) / STEPS
    config = model.config
    head = config.hidden_size // config.num_attention_heads
    states = 2 * LAYERS * BATCH * (prompt + 3) * config.num_key_value_heads * head * 2
    weights = sum(p.nbytes for name, p in model.named_parameters() if "embed_tokens" not in name)
    assert moved <= 1.05 * (weights + states), (moved, weights, states)
