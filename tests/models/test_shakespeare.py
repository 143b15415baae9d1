"""The small trained model: text, logits and perplexity with and without us."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from support import calls

import liteboost_adaptor

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "models" / "shakespeare-llama"
BLOCK = 256
PROMPTS = ("ROMEO:\nWhat light is this, that", "KING RICHARD III:\nNow", "First Citizen:")


def load(dtype: torch.dtype) -> torch.nn.Module:
    """The model, unserved: a test applies what it wants."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype).eval()


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FOLDER)


def test_the_tokenizer_is_named_as_every_supported_transformers_knows_it(tokenizer) -> None:
    # TokenizersBackend is 5's name; 4.57 also makes token types, which no Llama takes, unless told not to.
    import json

    config = json.loads((FOLDER / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast" and "backend" not in config
    assert config["model_input_names"] == ["input_ids", "attention_mask"] == tokenizer.model_input_names


@pytest.fixture(scope="module")
def blocks(tokenizer) -> torch.Tensor:
    """The held-out text as ``[blocks, BLOCK]`` token ids."""
    text = (FOLDER / "heldout.txt").read_text(encoding="utf-8")
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
    return ids[: len(ids) // BLOCK * BLOCK].reshape(-1, BLOCK)


@torch.no_grad()
def perplexity(model: torch.nn.Module, blocks: torch.Tensor) -> float:
    losses = []
    for batch in blocks.split(8):
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1].float()
        losses.append(
            torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none")
        )
    return math.exp(torch.cat(losses).double().mean().item())


def greedy_text(model: torch.nn.Module, tokenizer, prompt: str) -> str:
    inputs = tokenizer(prompt, return_tensors="pt")
    return tokenizer.decode(model.generate(**inputs, max_new_tokens=64, do_sample=False)[0])


def test_fp32_greedy_text_is_the_same_without_us_and_at_every_level(tokenizer) -> None:
    model = load(torch.float32)
    expected = [greedy_text(model, tokenizer, prompt) for prompt in PROMPTS]
    assert all(len(text) > 100 for text in expected)
    for level in (0, 1, 2):
        with liteboost_adaptor.patched(model, level=level), calls.served() as served:
            assert [greedy_text(model, tokenizer, prompt) for prompt in PROMPTS] == expected, level
        assert bool(served.rules) == (level > 0)
        assert served.fallbacks == {}


def test_fp32_greedy_text_of_a_padded_batch_is_the_same(tokenizer) -> None:
    model = load(torch.float32)
    tokenizer.padding_side = "left"
    inputs = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    expected = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    liteboost_adaptor.apply(model)
    assert torch.equal(model.generate(**inputs, max_new_tokens=48, do_sample=False), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_level_0_logits_are_bit_identical(dtype: torch.dtype, blocks: torch.Tensor) -> None:
    model = load(dtype)
    with torch.no_grad():
        expected = model(input_ids=blocks[:2]).logits
        with liteboost_adaptor.patched(model, level=0):
            assert torch.equal(model(input_ids=blocks[:2]).logits, expected)


@torch.no_grad()
def test_bf16_logits_are_as_near_to_fp32_as_without_us(blocks: torch.Tensor) -> None:
    """What the README says of bf16, where greedy text may differ."""
    ids, rounded = blocks[::20][:4], load(torch.bfloat16)
    exact = load(torch.float32)(input_ids=ids).logits.double()

    def distance() -> float:
        return float((rounded(input_ids=ids).logits.double() - exact).norm() / exact.norm())

    without = distance()
    for level in (1, 2):
        with liteboost_adaptor.patched(rounded, level=level):
            assert distance() <= 1.05 * without


#: dtype -> relative change of perplexity that leaves so many digits as they are: 4 in fp32, 3 in bf16.
DIGITS = {torch.float32: 0.5e-4, torch.bfloat16: 0.5e-3}


def check_perplexity(dtype: torch.dtype, blocks: torch.Tensor, level: int) -> float:
    model = load(dtype)
    expected = perplexity(model, blocks)
    with liteboost_adaptor.patched(model, level=level), calls.served() as served:
        found = perplexity(model, blocks)
    assert served.kinds["attention"] and served.fallbacks == {}
    assert abs(found / expected - 1) <= DIGITS[dtype], f"{found} in place of {expected}"
    return found


@pytest.mark.parametrize("dtype", DIGITS)
def test_perplexity_is_unchanged(dtype: torch.dtype, blocks: torch.Tensor) -> None:
    check_perplexity(dtype, blocks[::6], level=2)


@pytest.mark.full
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("dtype", DIGITS)
def test_perplexity_of_the_whole_text_is_unchanged(
    dtype: torch.dtype, level: int, blocks: torch.Tensor
) -> None:
    assert abs(check_perplexity(dtype, blocks, level) / 31.2 - 1) < 0.01, "not the model of the README"
