"""What goes into a forward call: embeddings, masks of the user's, packed sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import numbers, tiny_models
from support.ways import compare, families

FAMILIES = ("llama", "gpt2", "gemma2", "gemma3_text", "mixtral", "gpt_neox", "phi3", "gpt_oss", "deepseek_v3")


@torch.no_grad()
def logits(model: torch.nn.Module, **inputs: Any) -> torch.Tensor:
    return model(**inputs, use_cache=False).logits


@families(*FAMILIES, "qwen3_next", "mamba2")
def test_inputs_embeds(family: str, level: int) -> None:
    """The prompt as embeddings nobody's table holds, then tokens, with the cache between them."""
    model = tiny_models.build(family)
    inputs = numbers.padded_inputs(model)
    with torch.no_grad():
        embeds = model.get_input_embeddings()(inputs["input_ids"])
        embeds += 0.1 * torch.randn_like(embeds)
    mask = inputs["attention_mask"]

    def run() -> numbers.Greedy:
        return numbers.greedy(model, {"inputs_embeds": embeds, "attention_mask": mask}, steps=5)

    runs = compare(model, level, run)
    runs.assert_same_text()
    assert runs.served.kinds["norm"] > 0 and runs.served.kinds["linear"] > 0


def two_documents(length: int = 9, first: int = 5) -> torch.Tensor:
    """``[2, 1, length, length]``: causal, and in the second row two documents that do not see each other."""
    allowed = torch.ones(length, length, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
    allowed[1, :, first:, :first] = False
    return allowed


def additive(allowed: torch.Tensor) -> torch.Tensor:
    return torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("form", ["bool", "float", "bool of every query"])
@families("llama", "gpt2", "mixtral", "gpt_neox", "phi3", "deepseek_v3", "qwen3", "olmo2")
def test_masks_of_four_dimensions(family: str, form: str, level: int) -> None:
    model = tiny_models.build(family)
    ids = tiny_models.example_inputs(model, batch=2, length=9)["input_ids"]
    allowed = two_documents()
    if form == "bool of every query":  # nothing causal about it: a prefix that sees itself in both directions
        allowed[:, :, :4, :4] = True
    mask = additive(allowed) if form == "float" else allowed
    runs = compare(model, level, lambda: logits(model, input_ids=ids, attention_mask=mask))
    runs.assert_close()
    assert numbers.relative(runs.expected, logits(model, input_ids=ids)) > 1e-3, "the mask changes nothing"
    assert runs.served.kinds["attention"] == model.config.num_hidden_layers and runs.reasons == set()


@families("gemma2", "gpt_oss")
def test_masks_of_four_dimensions_for_eager_attention(family: str, level: int) -> None:
    model = tiny_models.build(family)
    ids = tiny_models.example_inputs(model, batch=2, length=9)["input_ids"]
    mask = additive(two_documents())
    runs = compare(model, level, lambda: logits(model, input_ids=ids, attention_mask=mask))
    runs.assert_close()
    assert runs.served.kinds["attention"] == model.config.num_hidden_layers and runs.reasons == set()


@families("llama", "mixtral", "gpt_neox", "phi3", "qwen3", "gemma2", "gemma3_text", "olmo2", "deepseek_v3")
def test_packed_sequences_with_position_ids(family: str, level: int) -> None:
    """Three documents in one row: each gets the logits it has alone."""
    model = tiny_models.build(family)
    ids = tiny_models.example_inputs(model, batch=1, length=15)["input_ids"]
    lengths = [4, 6, 5]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    runs = compare(model, level, lambda: logits(model, input_ids=ids, position_ids=positions))
    runs.assert_close()
    alone = torch.cat([logits(model, input_ids=part) for part in ids.split(lengths, dim=1)], dim=1)
    assert numbers.relative(runs.found, alone) <= 1e-4, "documents see each other"
    assert runs.served.kinds["attention"] == model.config.num_hidden_layers and runs.reasons == set()


def test_a_prefix_continued_in_pieces() -> None:
    """Chunks of 5, 1, 4 and 1 tokens on one cache: decode, prefill and what lies between."""
    model = tiny_models.build("llama")
    ids = tiny_models.example_inputs(model, length=11)["input_ids"]

    @torch.no_grad()
    def run() -> torch.Tensor:
        cache, found = None, []
        for piece in ids.split([5, 1, 4, 1], dim=1):
            out = model(input_ids=piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.logits)
        return torch.cat(found, dim=1)

    compare(model, 2, run).assert_close()
