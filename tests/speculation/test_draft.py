"""A draft model: loaded once, when it is needed; the text is the one without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import tiny_models
from torch import nn
from transformers.cache_utils import DynamicCache

import liteboost_adaptor
from liteboost_adaptor.huggingface.speculation import draft, refusals

from .speculating import Counts, both, drafts_here, repeating, served_here, settings, text

pytestmark = [served_here, drafts_here]


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return tiny_models.build("llama", seed=1)


@pytest.fixture(scope="module")
def folder(llama: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model itself, somewhat disturbed: often right, not always."""
    made = tiny_models.build("llama", seed=1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(9)) * 0.005)
    where = tmp_path_factory.mktemp("draft")
    made.save_pretrained(where)
    return str(where)


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were small: one as large as the model never pays."""
    monkeypatch.setattr(draft, "bytes_of", lambda model: 0)


@pytest.mark.usefixtures("cheap")
def test_greedy_text_is_the_same(llama: nn.Module, folder: str) -> None:
    counts = Counts()
    expected, found = both(llama, repeating(), folder, max_new_tokens=80)
    assert torch.equal(found, expected)
    assert counts.served == 1 and 0 < counts.accepted < counts.proposed
    made = draft.draft_of(llama, None).model
    assert made.dtype == llama.dtype and not made.training
    text(llama, repeating())
    assert draft.draft_of(llama, None).model is made, "loaded once"


def test_one_as_large_as_the_model_pauses(llama: nn.Module, folder: str) -> None:
    """And behind a pause goes on with the tokens that came in between."""
    counts = Counts()
    expected, found = both(llama, repeating(), folder, max_new_tokens=150)
    assert torch.equal(found, expected)
    assert counts.pauses > 0


@pytest.mark.usefixtures("cheap")
def test_other_settings(llama: nn.Module, folder: str) -> None:
    for more in (
        {"eos_token_id": 40},
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 25, "eos_token_id": 41},
    ):
        expected, found = both(llama, repeating(), folder, **more)
        assert torch.equal(found, expected)


@pytest.mark.usefixtures("cheap")
def test_turns_of_a_chat_with_a_kept_cache(llama: nn.Module, folder: str) -> None:
    texts = []
    for speculate in ("off", folder):
        liteboost_adaptor.apply(llama, speculate=speculate)
        cache, ids = DynamicCache(config=llama.config), repeating()
        for turn in range(2):
            out = text(llama, ids, past_key_values=cache)
            assert cache.get_seq_length() == out.shape[1] - 1
            ids = torch.cat((out, repeating(times=1) + turn), dim=1)
        texts.append(out)
    assert torch.equal(*texts)


@pytest.mark.usefixtures("cheap")
def test_sampling_accepts_by_both_distributions(llama: nn.Module, folder: str) -> None:
    liteboost_adaptor.apply(llama, speculate=folder)
    counts = Counts()
    torch.manual_seed(1)
    one = llama.generate(repeating(), **settings(do_sample=True))
    torch.manual_seed(1)
    assert torch.equal(llama.generate(repeating(), **settings(do_sample=True)), one)
    assert counts.served == 2 and counts.accepted


def test_what_a_draft_model_cannot_serve(llama: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import GenerationConfig

    config = GenerationConfig(max_length=90)
    given = {"generation_config": config, "past_key_values": DynamicCache(config=llama.config)}
    assert refusals.why_draft_not(llama, repeating(), given) == ""
    with torch.no_grad():
        llama(repeating(), past_key_values=given["past_key_values"])
    said = "the text before a kept cache is not given, which a draft model needs"
    assert refusals.why_draft_not(llama, repeating(), given) == said
    given["attention_mask"] = torch.ones_like(repeating())
    assert refusals.why_draft_not(llama, repeating(), given) == ""
    config.assistant_ensemble_weight = 0.5
    said = "assistant_ensemble_weight changes the distribution"
    assert refusals.why_draft_not(llama, repeating(), given) == said
    monkeypatch.setattr(refusals, "PREFILL", "_is_not_there")
    assert refusals.why_draft_not(llama, repeating(), given) == "a draft model needs transformers 5"


def test_another_vocabulary_is_a_reason(llama: nn.Module, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=100)).save_pretrained(tmp_path)
    counts = Counts()
    expected, found = both(llama, repeating(), str(tmp_path))
    assert torch.equal(found, expected)
    (reason,) = counts.reasons
    assert reason.startswith("the draft model has a vocabulary of 100 tokens, the model of ")


def test_one_that_cannot_be_loaded_is_a_reason(llama: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    counts = Counts()
    expected, found = both(llama, repeating(), str(tmp_path))
    assert torch.equal(found, expected)
    (reason,) = counts.reasons
    assert reason.startswith("the draft model cannot be loaded: ")


def test_undo_lets_it_go(llama: nn.Module, folder: str) -> None:
    liteboost_adaptor.apply(llama, speculate=folder)
    text(llama, repeating())
    liteboost_adaptor.undo(llama)
    assert draft._DRAFT not in vars(llama)
