"""Loading in parts needs the memory of the part, and asks files for no more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parallel import ranks
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.usefixtures("native_only")


def save(folder: Path, hidden: int, layers: int, vocabulary: int) -> None:
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    model.tie_weights()
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    model.save_pretrained(folder, max_shard_size="100MB")


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
def test_memory_of_a_rank_while_it_loads(tmp_path: Path, size: int) -> None:
    save(tmp_path / "small", 64, 1, 512)
    save(tmp_path / "large", 1024, 12, 64_000)  # 530 MB
    for found in ranks.run(
        size, "parallel.jobs_memory:load", str(tmp_path / "small"), str(tmp_path / "large")
    ):
        assert found["shard"] > 100_000_000
        allowed = found["shard"] + found["largest"]
        assert found["grown"] <= 1.15 * allowed
        assert found["high_water"] <= 1.5 * 1.15 * allowed
        assert found["asked"] <= 1.1 * found["shard"]
