"""Recorded steps of continuous batching: the tokens of the original, and who made them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import calls, tiny_models

import liteboost_adaptor
from liteboost_adaptor.huggingface import paged, ragged
from liteboost_adaptor.program import reasons, schedule, step
from liteboost_adaptor.report import report

pytest.importorskip(
    "transformers.generation.continuous_batching.cache_allocators",
    reason="this transformers has another paged cache",
    exc_type=ImportError,
)

from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache

RULE = "step.program"
#: Of requests that end one after the other, on both sides of the end of a page.
LENGTHS = (1, 3, 15, 16, 17, 2, 40, 61)
NEW = 70


def prompts(model: Any, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(17)
    return [
        torch.randint(3, model.config.vocab_size, (each,), generator=generator).tolist() for each in lengths
    ]


def batched(model: Any, requests: list[list[int]], new: int = NEW, **config: Any) -> list[list[int]]:
    config = {"page_size": 16, "num_blocks": 100, "max_batch_tokens": 64, **config}
    outputs = model.generate_batch(
        requests,
        generation_config=GenerationConfig(
            max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(**config),
        warmup=False,
    )
    assert not any(each.error for each in outputs.values())
    return [each.generated_tokens for each in outputs.values()]


def unserved(served: Any) -> set[str]:
    """Why steps were made by the original."""
    return {reason for rule, reason in served.fallbacks if rule == RULE}


@pytest.fixture
def llama() -> Iterator[Any]:
    yield tiny_models.build("llama")


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "mistral", "gpt_oss", "qwen3_moe"])
def test_the_tokens_of_the_original(family: str) -> None:
    model = tiny_models.build(family)
    requests = prompts(model)
    expected, alone = batched(model, requests), batched(model, requests[3:4])
    liteboost_adaptor.apply(model, level=2)
    with warnings.catch_warnings(), calls.served() as first:
        warnings.simplefilter("error")  # a difference is one
        assert batched(model, requests) == expected
    with calls.served() as second:
        assert batched(model, requests) == expected
        assert batched(model, requests[3:4]) == alone
    assert unserved(first) | unserved(second) <= {paged.WINDOWS}
    assert first.rules[RULE] > NEW / 2
    # Of the second run all but what comes for the first time: one request by itself, or a chunk of a window.
    assert second.rules[RULE] > 2 * NEW - 20


def test_steps_of_any_number_of_requests_have_one_program(llama: Any) -> None:
    liteboost_adaptor.apply(llama, level=2)
    requests = prompts(llama, (5, 6, 7, 8, 9, 10, 11))
    batched(llama, requests, max_batch_tokens=256)
    with calls.served() as served:
        for count in range(2, 8):
            batched(llama, requests[:count], new=9, max_batch_tokens=256)
    assert not unserved(served), served.fallbacks
    assert served.rules[RULE] == 6 * 8


def test_prompts_that_join_are_steps_of_the_same_program(llama: Any) -> None:
    """Chunks of prompts beside requests that decode: tokens, requests and logits are three lengths."""
    requests = prompts(llama, (30, 50, 70, 90, 110))
    limits = {"max_batch_tokens": 24, "num_blocks": 60}
    expected = batched(llama, requests, new=30, **limits)
    liteboost_adaptor.apply(llama, level=2)
    batched(llama, requests, new=64, **limits)
    with calls.served() as served:
        assert batched(llama, requests, new=30, **limits) == expected
    assert not unserved(served)
    assert served.rules[RULE] > 30


def test_large_parts_of_prompts_are_left_to_the_original(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes little of such a step, and a check of it as long as the step."""
    monkeypatch.setattr(ragged, "_PROMPT_TOKENS", 8)
    requests = prompts(llama, (30, 50, 70, 90, 110))
    limits = {"max_batch_tokens": 24, "num_blocks": 60}
    expected = batched(llama, requests, new=30, **limits)
    liteboost_adaptor.apply(llama, level=2)
    with calls.served() as served:
        assert batched(llama, requests, new=30, **limits) == expected
    assert not unserved(served)
    steps = served.rules[RULE]
    monkeypatch.setattr(ragged, "_PROMPT_TOKENS", 256)
    with calls.served() as served:
        assert batched(llama, requests, new=30, **limits) == expected
    assert served.rules[RULE] > steps + 10


def test_a_cache_that_no_rule_serves_is_left_to_transformers(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before 5.23, where caches are others: no step is tried, none is counted."""
    requests = prompts(llama)
    expected = batched(llama, requests)
    liteboost_adaptor.apply(llama, level=2)
    monkeypatch.setattr(paged, "_rules", set())
    counter = report.counter(RULE)
    before = counter.calls, dict(counter.fallbacks)
    assert batched(llama, requests) == expected
    assert (counter.calls, dict(counter.fallbacks)) == before


def test_another_cache_is_read_by_the_same_program(llama: Any) -> None:
    requests = prompts(llama)
    expected = batched(llama, requests, page_size=7, num_blocks=300)
    liteboost_adaptor.apply(llama, level=2)
    batched(llama, requests)
    with calls.served() as served:
        batched(llama, requests, num_blocks=200)
    assert not unserved(served)
    with calls.served() as served:
        assert batched(llama, requests, page_size=7, num_blocks=300) == expected
    assert served.rules[RULE] > NEW / 2


def test_weights_and_methods_that_change_are_seen(llama: Any) -> None:
    liteboost_adaptor.apply(llama, level=2)
    requests = prompts(llama)
    first = batched(llama, requests)
    with torch.no_grad():
        llama.model.layers[0].mlp.down_proj.weight.mul_(-3)
    changed = batched(llama, requests)
    activation = type(llama.model.layers[1].mlp.act_fn).forward
    type(llama.model.layers[1].mlp.act_fn).forward = lambda self, x: torch.tanh(x)
    try:
        with calls.served() as served:
            replaced = batched(llama, requests)
        liteboost_adaptor.undo(llama)
        assert batched(llama, requests) == replaced
    finally:
        type(llama.model.layers[1].mlp.act_fn).forward = activation
    assert batched(llama, requests) == changed != first
    assert reasons.CHANGED in unserved(served)


def test_without_paged_attention_nothing_is_recorded(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = prompts(llama)
    expected = batched(llama, requests)
    liteboost_adaptor.apply(llama, level=2, disable=["paged.*"])
    with calls.served() as served:
        assert batched(llama, requests) == expected
    assert not served.rules[RULE]
    assert unserved(served)


def test_a_cache_that_writes_otherwise_writes_by_itself(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    liteboost_adaptor.apply(llama, level=2)
    requests = prompts(llama)
    expected = batched(llama, requests)
    original = PagedAttentionCache.update
    written = []

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        written.append(True)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(PagedAttentionCache, "update", update)
    with calls.served() as served:
        assert batched(llama, requests) == expected
    assert not served.rules[RULE]
    assert len(written) >= NEW * llama.config.num_hidden_layers


def test_rows_that_a_program_writes_elsewhere_are_noticed(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original runs beside some replays: what both have written to the pages is compared, too."""
    liteboost_adaptor.apply(llama, level=2)
    requests = prompts(llama)
    expected = batched(llama, requests)
    liteboost_adaptor.undo(llama)
    liteboost_adaptor.apply(llama, level=2)
    rows, looks = ragged._new_rows, []

    def other_rows(*args: Any) -> list[torch.Tensor]:
        looks.append(True)
        return [each + len(looks) for each in rows(*args)]

    monkeypatch.setattr(ragged, "_new_rows", other_rows)
    with calls.served() as served, pytest.warns(RuntimeWarning, match="what it writes to the cache"):
        assert batched(llama, requests) == expected
    assert looks
    assert any("differed from the original in what it writes" in reason for reason in unserved(served))


def test_few_steps_are_not_recorded(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "RECORDED_AT", 64)
    liteboost_adaptor.apply(llama, level=2)
    with calls.served() as served:
        batched(llama, prompts(llama), new=8)
    assert not unserved(served)  # of those on the way to a program nothing is said
    assert not served.rules[RULE]
    with calls.served() as served:
        batched(llama, prompts(llama), new=80)  # known from the first one on
    assert served.rules[RULE] > 60


def test_how_many_tokens_are_to_come_is_read_of_the_requests() -> None:
    class Request:
        def __init__(self, most: int | None, made: int) -> None:
            self.state = self
            self.max_new_tokens, self.generated_tokens = most, [0] * made

    class Runner:
        def __init__(self, *requests: Request) -> None:
            self.inputs_and_outputs = self
            self.requests_in_batch = requests

    assert schedule._batches_to_come(Runner(Request(10, 4), Request(90, 7), Request(None, 3))) == 83
    assert schedule._batches_to_come(Runner()) == schedule._batches_to_come(None) == 0


def test_a_cache_of_an_older_transformers_is_none_of_ours() -> None:
    older = type("PagedAttentionCache", (), {"__module__": PagedAttentionCache.__module__})()
    assert not ragged.is_ragged({"cache": older})
    older.layer_to_allocator = {}
    assert not ragged.is_ragged({"cache": older})
    older.cache_allocators = {}
    assert ragged.is_ragged({"cache": older})
    assert not ragged.is_ragged({"cache": None}) and not ragged.is_ragged({})
