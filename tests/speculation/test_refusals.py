"""Where the original runs: each with its reason, counted, and the result without speculation."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import tiny_models
from torch import nn
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
)
from transformers.cache_utils import DynamicCache, StaticCache

import liteboost_adaptor
from liteboost_adaptor.huggingface.speculation import pace, refusals

from .speculating import Counts, both, repeating, served_here, text

pytestmark = served_here


class CountsCalls(LogitsProcessor):
    calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return tiny_models.build("llama", seed=1)


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": 2}, "num_beams is above 1"),
    ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences is above 1"),
    ({"max_new_tokens": 15}, "fewer than 16 new tokens"),
    ({"use_cache": False}, "use_cache is off"),
    # Older releases compare candidates with what ends a text, if that is None, too.
    ({"prompt_lookup_num_tokens": 3, "eos_token_id": 3}, "prompt_lookup_num_tokens is given"),
    ({"cache_implementation": "static"}, "no cache that can be cropped"),
    ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor may keep a state"),
    ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
]


@pytest.mark.parametrize(("more", "reason"), SETTINGS, ids=[reason for _, reason in SETTINGS])
def test_settings(llama: nn.Module, more: dict[str, Any], reason: str) -> None:
    torch.manual_seed(2)
    liteboost_adaptor.apply(llama, speculate="off")
    expected = text(llama, repeating(), **more)
    torch.manual_seed(2)
    liteboost_adaptor.apply(llama, speculate="lookup")
    counts = Counts()
    found = text(llama, repeating(), **more)
    assert counts.reasons == {reason: 1} and not counts.served
    ours, theirs = (out if isinstance(out, torch.Tensor) else out.sequences for out in (found, expected))
    assert torch.equal(ours, theirs)


def test_small_models(llama: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "HOST_SECONDS", 0.5e-3)
    counts = Counts()
    expected, found = both(llama, repeating())
    assert torch.equal(found, expected) and counts.served == 0
    reason = "the model is so small that candidates cost the host more than they save"
    assert counts.reasons == {reason: 1}
    assert pace.step_cost(80 << 20) < pace.MOST_STEP_COST < pace.step_cost(70 << 20)


def test_several_sequences(llama: nn.Module) -> None:
    counts = Counts()
    expected, found = both(llama, repeating().repeat(2, 1))
    assert torch.equal(found, expected)
    assert counts.reasons == {"a batch of several sequences": 1}


def test_an_assistant_of_the_users(llama: nn.Module) -> None:
    assistant = tiny_models.build("llama", seed=5)
    liteboost_adaptor.apply(assistant, speculate="lookup")
    counts = Counts()
    expected, found = both(llama, repeating(), assistant_model=assistant)
    assert torch.equal(found, expected)
    assert counts.reasons == {"assistant_model is given": 1} and not counts.served


def test_custom_generate(llama: nn.Module) -> None:
    def theirs(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return input_ids

    liteboost_adaptor.apply(llama, speculate="lookup")
    counts = Counts()
    assert torch.equal(text(llama, repeating(), custom_generate=theirs), repeating())
    assert counts.reasons == {"custom_generate is given": 1}


def test_processors_of_others(llama: nn.Module) -> None:
    processor = CountsCalls()
    liteboost_adaptor.apply(llama, speculate="lookup")
    counts = Counts()
    text(llama, repeating(), logits_processor=LogitsProcessorList([processor]))
    assert counts.reasons == {"CountsCalls may keep a state": 1}
    assert processor.calls == 40


def test_inputs_embeds(llama: nn.Module) -> None:
    liteboost_adaptor.apply(llama, speculate="lookup")
    counts = Counts()
    with torch.no_grad():
        embeds = llama.get_input_embeddings()(repeating())
    llama.generate(
        inputs_embeds=embeds, max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    assert counts.reasons == {"inputs_embeds": 1}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"past_key_values": DynamicCache(offloading=True)}, "an offloaded cache"),
        ({"past_key_values": StaticCache(LlamaConfig(), max_cache_len=64)}, "no cache that can be cropped"),
        ({"past_key_values": None}, "no cache that can be cropped"),
        ({"synced_gpus": True}, "synced_gpus"),
        ({"pixel_values": torch.ones(1)}, "inputs beside the text: pixel_values"),
        ({"position_ids": torch.ones(3, 1, 4)}, "positions in several dimensions"),
        ({"attention_mask": torch.ones(1, 50)}, "a mask of another length than the tokens"),
    ],
    ids=lambda value: value or "none" if isinstance(value, str) else "",
)
def test_arguments(llama: nn.Module, change: dict[str, Any], reason: str) -> None:
    config = GenerationConfig(max_length=90)
    given = {"generation_config": config, "logits_processor": [], "use_cache": True}
    given |= {"past_key_values": DynamicCache(config=llama.config), "position_ids": None, **change}
    assert refusals.why_not(llama, repeating(), given) == reason


def test_experts_with_a_capacity(llama: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.config, "expert_capacity", 4, raising=False)
    assert refusals.why_not(llama, repeating(), {}) == "experts that take so many tokens of a call"


def test_inputs_that_somebody_prepares(llama: nn.Module) -> None:
    """As PEFT does for prompts that are learned."""
    liteboost_adaptor.apply(llama, speculate="lookup")
    counts = Counts()
    llama.prepare_inputs_for_generation = llama.prepare_inputs_for_generation
    try:
        text(llama, repeating())
    finally:
        del llama.prepare_inputs_for_generation
    assert counts.reasons == {"somebody has replaced how the model prepares its inputs": 1}


def _changing(forward: Any, calls: Iterator[int], *args: Any, **kwargs: Any) -> Any:
    """``forward``, which says another token at every seventh call."""
    output = forward(*args, **kwargs)
    if next(calls) % 7 == 0:
        output.logits = output.logits.roll(1, -1)
    return output


class OwnForward(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls: Iterator[int] = vars(self).get("calls") or itertools.count(1)
        return _changing(super().forward, self.calls, *args, **kwargs)


def test_a_forward_that_may_keep_a_state() -> None:
    def of_the_class(model: Any, speculate: str) -> None:
        model.__class__ = OwnForward
        liteboost_adaptor.apply(model, speculate=speculate)

    def of_the_instance(model: Any, speculate: str) -> None:
        liteboost_adaptor.apply(model, speculate=speculate)
        model.forward = functools.partial(_changing, model.forward, itertools.count(1))

    reasons = []
    for change in (of_the_class, of_the_instance):
        texts = []
        for speculate in ("off", "lookup"):
            model = tiny_models.build("llama", seed=1)
            change(model, speculate)
            counts = Counts()
            texts.append(text(model, repeating()))
        assert torch.equal(*texts) and not counts.served
        reasons += counts.reasons
    assert reasons == ["the model's forward is code of its own", "somebody has replaced the model's forward"]


def test_a_forward_of_the_class_on_the_instance(llama: nn.Module) -> None:
    """Releases that collect outputs by wrapping it there leave it behind."""
    liteboost_adaptor.apply(llama, speculate="lookup")
    llama.forward = llama.forward
    try:
        counts = Counts()
        text(llama, repeating())
        assert counts.served == 1 and not counts.reasons
    finally:
        del llama.forward


def test_training_mode(llama: nn.Module) -> None:
    liteboost_adaptor.apply(llama, speculate="lookup")
    counts = Counts()
    llama.train()
    try:
        text(llama, repeating())
    finally:
        llama.eval()
    assert counts.reasons == {"the model is in training mode": 1}


def test_several_processes(llama: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    liteboost_adaptor.apply(llama, speculate="lookup")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    counts = Counts()
    text(llama, repeating())
    assert counts.reasons == {"several processes": 1}


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma2", "a cache with a sliding window"),
        ("gpt_oss", "a cache with a sliding window"),
        ("lfm2", "no cache that can be cropped"),
        ("qwen3_next", "the model keeps a state that cannot be taken back"),
        ("mamba", "the model keeps a state that cannot be taken back"),
        ("rwkv", "the model keeps a state that cannot be taken back"),
    ],
)
def test_models_whose_cache_cannot_be_cropped(family: str, reason: str) -> None:
    model = tiny_models.build(family)
    counts = Counts()
    expected, found = both(model, repeating(), max_new_tokens=20)
    assert torch.equal(found, expected) and not counts.served
    assert counts.reasons == {reason: 1}


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_that_depend_on_the_longest_position(kind: str) -> None:
    model = tiny_models.build("llama")
    model.config.rope_parameters = {"rope_type": kind}
    liteboost_adaptor.apply(model, speculate="lookup")
    counts = Counts()
    text(model, repeating())
    assert counts.reasons == {"a rotary embedding that depends on the longest position of a call": 1}


def test_processors_that_are_named_are_there() -> None:
    from transformers.generation import logits_process

    missing = {name for name in refusals.STATELESS if not hasattr(logits_process, name)}
    assert missing <= {"TopHLogitsWarper"}, "of a later release"


def test_compiled_models_run_the_original(llama: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    liteboost_adaptor.apply(llama, speculate="lookup")
    expected = text(llama, repeating())
    counts = Counts()
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        found = text(llama, repeating())
    assert torch.equal(found, expected) and not counts.served
