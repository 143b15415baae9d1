"""`LITEBOOST_BATCH_INVARIANT`: a model's logits do not depend on how tokens are grouped."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support import families, tiny_models
from transformers import StaticCache

import liteboost_adaptor
from liteboost_adaptor.config import Settings
from liteboost_adaptor.errors import ConfigError
from liteboost_adaptor.huggingface import batch_invariant

#: Grouped heads, norms of them, a cap and a window, a bias, experts, Conv1D, sinks; routers and gates that
#: take a sigmoid of fewer numbers than a vector has; attention that is a model's own products; a state;
#: latent attention. tests/models/test_batch_invariance.py goes through all families.
FAMILIES = [
    *("llama", "qwen3", "gemma2", "mistral", "opt", "phi", "mixtral", "qwen3_moe", "gpt2", "gpt_oss"),
    *("glm4_moe", "llama4_text", "qwen2_moe", "bloom", "gpt_neo", "qwen3_next", "deepseek_v3"),
]
TOKENS = 40


def rows_asked() -> int:
    return torch.ops.liteboost._batch_invariant_rows()


def logits(
    model: torch.nn.Module, ids: torch.Tensor, sizes: Sequence[int], cache: Any = None
) -> torch.Tensor:
    """Of all positions of ``ids``, read in parts of these sizes."""
    found, begin = [], 0
    with torch.no_grad():
        for size in sizes:
            output = model(input_ids=ids[:, begin : begin + size], past_key_values=cache, use_cache=True)
            cache, begin = output.past_key_values, begin + size
            found.append(output.logits)
    assert begin == ids.shape[1]
    return torch.cat(found, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_batches_and_single_tokens_agree(family: str, dtype: torch.dtype) -> None:
    model = tiny_models.build(family).eval()
    families.cast(model, dtype)
    liteboost_adaptor.apply(model, batch_invariant=True)
    ids = tiny_models.example_inputs(model, batch=5, length=TOKENS)["input_ids"]
    one_by_one = logits(model, ids[:1], [1] * TOKENS)
    for sizes in ([TOKENS], [7] * 5 + [5], [1, 2, 3, 16, 18]):
        assert torch.equal(logits(model, ids[:1], sizes), one_by_one), f"chunks {sizes}"
    assert torch.equal(logits(model, ids, [1] * TOKENS)[:1], one_by_one), "a batch, token by token"
    assert torch.equal(logits(model, ids, [7] * 5 + [5])[:1], one_by_one), "a batch, in chunks"


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3", torch.bfloat16),
        ("gemma2", torch.float32),
        ("gpt_oss", torch.bfloat16),
        ("gpt_neo", torch.float32),
    ],
    ids=str,
)
def test_long_prompts_and_padding_agree(family: str, dtype: torch.dtype) -> None:
    """Of more tokens than loops take at once, behind padding that is no multiple of anything."""
    model = tiny_models.build(family).eval()
    families.cast(model, dtype)
    liteboost_adaptor.apply(model, batch_invariant=True)
    tokens, padding = 150, 37
    ids = tiny_models.example_inputs(model, batch=2, length=tokens + padding)["input_ids"]
    alone = logits(model, ids[:1, padding:], [120, *[1] * 30])
    for sizes in ([tokens], [64, 64, 22], [7] * 17 + [31]):
        assert torch.equal(logits(model, ids[:1, padding:], sizes), alone), f"chunks {sizes}"
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        padded = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:1, padding:]
    assert torch.equal(padded, alone)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3"])
def test_static_caches_agree(family: str) -> None:
    """A prompt has no mask, and a cache with more room than it has tokens."""
    model = tiny_models.build(family).eval()
    liteboost_adaptor.apply(model, batch_invariant=True)
    ids = tiny_models.example_inputs(model, batch=1, length=TOKENS)["input_ids"]

    def static() -> StaticCache:
        return StaticCache(config=model.config, max_cache_len=TOKENS + 24)

    one_by_one = logits(model, ids, [1] * TOKENS)
    for sizes in ([TOKENS], [7] * 5 + [5], [1] * TOKENS):
        assert torch.equal(logits(model, ids, sizes, static()), one_by_one), f"chunks {sizes}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_steps_of_latent_attention(family: str, dtype: torch.dtype) -> None:
    """Behind a prompt, whose keys are expanded, all new tokens of a step attend as one does."""
    model = tiny_models.build(family).eval()
    families.cast(model, dtype)
    liteboost_adaptor.apply(model, speculate="lookup")
    ids = tiny_models.example_inputs(model, batch=1, length=TOKENS)["input_ids"]
    with batch_invariant.checking(Settings(speculate="lookup")):
        one_by_one = logits(model, ids, [16] + [1] * 24)
        for sizes in ([16, 7, 7, 7, 3], [16, 16, 8], [16, 2, 1, 4, 15, 2]):
            assert torch.equal(logits(model, ids, sizes), one_by_one), f"steps {sizes}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "family", ["qwen3", "gpt2", "phi", "qwen3_moe", "glm4_moe", "llama4_text", "deepseek_v3"]
)
def test_steps_that_check_candidates_have_the_bits_of_single_ones(family: str, dtype: torch.dtype) -> None:
    """Of those that nothing is asked for, also where torch multiplies by the weights of a router."""
    model = tiny_models.build(family).eval()
    families.cast(model, dtype)
    liteboost_adaptor.apply(model, speculate="lookup")
    ids = tiny_models.example_inputs(model, batch=1, length=TOKENS)["input_ids"]

    def behind_a_prompt(sizes: Sequence[int], settings: Settings) -> torch.Tensor:
        with torch.no_grad():
            cache = model(input_ids=ids[:, :16], use_cache=True).past_key_values
        with batch_invariant.checking(settings):
            return logits(model, ids[:, 16:], sizes, cache)

    nothing = Settings(speculate="lookup", disable=(batch_invariant.RULE,))
    single = behind_a_prompt([1] * 24, nothing)
    for sizes in ([7, 7, 7, 3], [16, 8], [2, 3, 4, 15]):
        assert torch.equal(behind_a_prompt(sizes, Settings(speculate="lookup")), single), f"steps {sizes}"


def test_a_model_that_is_gone_asks_no_more() -> None:
    liteboost_adaptor.undo()
    first, second = tiny_models.build("llama"), tiny_models.build("llama")
    liteboost_adaptor.apply(first, batch_invariant=True)
    liteboost_adaptor.apply(second, speculate="lookup")
    gc.collect()
    assert rows_asked() == batch_invariant.ROWS
    del first
    assert rows_asked() == 1
    del second
    assert not batch_invariant._asked


def test_a_model_asks_while_it_is_bound() -> None:
    assert rows_asked() == 1
    first, second = tiny_models.build("llama"), tiny_models.build("llama")
    liteboost_adaptor.apply(first, batch_invariant=True)
    assert rows_asked() == batch_invariant.ROWS
    liteboost_adaptor.apply(second, speculate="lookup")
    assert rows_asked() == batch_invariant.ROWS
    liteboost_adaptor.undo(first)
    assert rows_asked() == 1
    rule = next(rule for rule in liteboost_adaptor.status().rules if rule.id == batch_invariant.RULE)
    assert (rule.state, rule.reason) == ("applied", "up to 16 rows, in steps that check candidates")
    liteboost_adaptor.undo(second)


def test_steps_that_check_candidates_ask_in_their_thread() -> None:
    def elsewhere() -> int:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(rows_asked).result()

    settings = Settings(speculate="lookup")
    with batch_invariant.checking(settings):
        assert (rows_asked(), elsewhere()) == (batch_invariant.SPECULATED_ROWS, 1)
    assert rows_asked() == 1
    with pytest.raises(KeyError), batch_invariant.checking(settings):
        raise KeyError
    assert rows_asked() == 1
    with batch_invariant.checking(Settings(speculate="lookup", disable=("ops.*",))):
        assert rows_asked() == 1


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"level": 0}, None),
        ({"disable": "ops.*"}, "turned off by LITEBOOST_DISABLE=ops.*"),
    ],
)
def test_turned_off(settings: dict[str, Any], reason: str | None) -> None:
    liteboost_adaptor.apply(tiny_models.build("llama"), batch_invariant=True, **settings)
    assert rows_asked() == 1
    found = [rule for rule in liteboost_adaptor.status().rules if rule.id == batch_invariant.RULE]
    assert reason is None or [rule.reason for rule in found] == [reason]


def test_other_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="batch_invariant must be 0 or 1; found 'sometimes'"):
        liteboost_adaptor.apply(batch_invariant="sometimes")  # type: ignore[arg-type]
