"""Generation strategies, caches, and attention implementations asked for by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import calls, numbers, tiny_models

import liteboost_adaptor

TOLERANCE = 2e-5
STRATEGIES: dict[str, dict[str, Any]] = {
    "beam search": {"num_beams": 3},
    "beams and batch": {"num_beams": 2, "num_return_sequences": 2},
    "without a cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "quadratic prefill in chunks": {"prefill_chunk_size": 4},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
}


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_give_the_originals_text(strategy: str, family: str) -> None:
    model = tiny_models.build(family)
    is_single = "lookup" in strategy
    inputs = numbers.padded_inputs(model, paddings=(0,) if is_single else (0, 3, 6))
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}

    def run() -> torch.Tensor:
        with torch.no_grad():
            return model.generate(**inputs, **settings, **STRATEGIES[strategy])

    expected = run()
    liteboost_adaptor.apply(model)
    with calls.served() as served:
        assert torch.equal(run(), expected)
    assert served.kinds["attention"] > 0


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_a_static_cache_gives_the_originals_logits(family: str) -> None:
    from transformers import StaticCache

    model = tiny_models.build(family)
    inputs = tiny_models.example_inputs(model, batch=1, length=11)
    more = torch.tensor([[77]])

    @torch.no_grad()
    def run() -> torch.Tensor:
        cache = StaticCache(config=model.config, max_cache_len=24)
        first = model(input_ids=inputs["input_ids"], past_key_values=cache).logits
        return torch.cat([first, model(input_ids=more, past_key_values=cache).logits], dim=1)

    expected = run()
    liteboost_adaptor.apply(model)
    assert numbers.relative(run(), expected) <= TOLERANCE


def test_sampling_with_a_seed_is_the_same() -> None:
    model = tiny_models.build("llama")
    inputs = tiny_models.example_inputs(model)

    def run() -> torch.Tensor:
        torch.manual_seed(3)
        return model.generate(**inputs, max_new_tokens=8, do_sample=True, pad_token_id=0)

    expected = run()
    liteboost_adaptor.apply(model)
    assert torch.equal(run(), expected)


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

    expected = run()
    liteboost_adaptor.apply(model)
    assert numbers.relative(run(), expected) <= TOLERANCE


@pytest.mark.parametrize("form", ["bool 4-D", "float 4-D", "none", "packed"])
def test_masks_the_user_makes(form: str) -> None:
    model = tiny_models.build("llama")
    ids = tiny_models.example_inputs(model, batch=2, length=9)["input_ids"]
    allowed = torch.ones(9, 9, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
    allowed[1, :, 5:, :5] = False
    inputs: dict[str, Any] = {"input_ids": ids}
    if form == "bool 4-D":
        inputs["attention_mask"] = allowed
    elif form == "float 4-D":
        inputs["attention_mask"] = torch.zeros(2, 1, 9, 9).masked_fill(
            ~allowed, torch.finfo(torch.float32).min
        )
    elif form == "packed":
        inputs["position_ids"] = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).repeat(2, 1)
    with torch.no_grad():
        expected = model(**inputs, use_cache=False).logits
        liteboost_adaptor.apply(model)
        with calls.served() as served:
            found = model(**inputs, use_cache=False).logits
    assert numbers.relative(found, expected) <= TOLERANCE
    assert served.kinds["attention"] == 2


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_attention_weights_are_returned_where_the_original_returns_them(family: str) -> None:
    model = tiny_models.build(family)
    inputs = tiny_models.example_inputs(model)
    with torch.no_grad():
        expected = model(**inputs, output_attentions=True)
        liteboost_adaptor.apply(model)
        with calls.served() as served:
            found = model(**inputs, output_attentions=True)
    assert len(expected.attentions) == model.config.num_hidden_layers
    for ours, original in zip(found.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(ours, original, rtol=1e-4, atol=1e-5)
    assert any(why == "attention weights wanted" for _, why in served.fallbacks)
    assert served.kinds["attention"] == 0
    with torch.no_grad(), calls.served() as served:
        model(**inputs)
    assert served.kinds["attention"] == model.config.num_hidden_layers


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "gpt_oss"])
def test_hidden_states_are_the_originals(family: str) -> None:
    model = tiny_models.build(family)
    inputs = tiny_models.example_inputs(model)
    with torch.no_grad():
        expected = model(**inputs, output_hidden_states=True).hidden_states
        liteboost_adaptor.apply(model)
        found = model(**inputs, output_hidden_states=True).hidden_states
    assert len(found) == len(expected) == model.config.num_hidden_layers + 1
    for ours, original in zip(found, expected, strict=True):
        assert numbers.relative(ours, original) <= TOLERANCE


def test_router_logits_are_the_originals() -> None:
    model = tiny_models.build("gpt_oss")
    inputs = tiny_models.example_inputs(model)
    with torch.no_grad():
        expected = model(**inputs, output_router_logits=True).router_logits
        liteboost_adaptor.apply(model)
        found = model(**inputs, output_router_logits=True).router_logits
    assert len(found) == len(expected) > 0
    for ours, original in zip(found, expected, strict=True):
        assert numbers.relative(ours, original) <= TOLERANCE


@pytest.mark.parametrize("way", ["at loading", "later"])
def test_eager_asked_for_stays_eager(way: str) -> None:
    settings = {"attn_implementation": "eager"} if way == "at loading" else {}
    model = tiny_models.build("llama", **settings)
    if way == "later":
        liteboost_adaptor.apply(model)
        model.set_attn_implementation("eager")
    codes = {code: kind for code, kind in calls.originals(model).items() if kind == "attention"}
    inputs = tiny_models.example_inputs(model)
    with torch.no_grad():
        liteboost_adaptor.apply(model)
        with calls.served() as served:
            out, seen = calls.count(codes, lambda: model(**inputs, output_attentions=True))
    assert seen["attention"] == 2 and served.kinds["attention"] == 0
    assert len(out.attentions) == 2 and served.kinds["rope"] == 2


def test_sdpa_asked_for_again_later_is_served() -> None:
    model = tiny_models.build("llama", attn_implementation="eager")
    inputs = tiny_models.example_inputs(model)
    liteboost_adaptor.apply(model)
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), calls.served() as served:
        model(**inputs)
    assert served.kinds["attention"] == 2


def test_pipelines_and_assistants() -> None:
    from transformers import GenerationConfig

    model, assistant = tiny_models.build("llama"), tiny_models.build("llama", seed=5)
    inputs = tiny_models.example_inputs(model, batch=1)
    config = GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0)

    def run() -> torch.Tensor:
        return model.generate(**inputs, generation_config=config, assistant_model=assistant)

    expected = run()
    liteboost_adaptor.apply(model)
    assert torch.equal(run(), expected)
    liteboost_adaptor.apply(assistant)
    assert torch.equal(run(), expected)
