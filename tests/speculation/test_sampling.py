"""Sampled texts have the distribution without speculation: by a chi-square test over thousands of texts."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import liteboost_adaptor
from liteboost_adaptor.huggingface.speculation import draft, refusals

from .speculating import Counts, drafts_here, served_here

pytestmark = served_here

NEW_TOKENS = 6
#: Texts without speculation, which a batch makes; texts with it; and these in the second tier.
PLAIN, TEXTS, MANY, DRAFTED = 20_000, 600, 4000, 1200
#: Of a chi-square with 8^2 - 1 degrees of freedom: exceeded once in ten thousand times.
BOUND = 113.5
#: Where in a text pairs of tokens are counted.
PLACES = (1, 2, 4)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Of 8 tokens, none of which is certain."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=8, max_position_embeddings=128)).eval()
    with torch.no_grad():
        made.lm_head.weight.normal_(std=1.0)
    return made


Pairs = Counter[tuple[int, int]]


def generated(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    more = {"max_new_tokens": NEW_TOKENS, "do_sample": True, "top_k": 0, "pad_token_id": 0}
    return model.generate(ids, **more, eos_token_id=None)[:, ids.shape[1] :]


def pairs(texts: torch.Tensor) -> list[Pairs]:
    """How often each pair of tokens came at each of `PLACES`."""
    return [Counter(map(tuple, texts[:, at : at + 2].tolist())) for at in PLACES]


def chi_square(one: Pairs, two: Pairs) -> float:
    """Of two samples, whether they are of one distribution."""
    ratio = (sum(two.values()) / sum(one.values())) ** 0.5
    keys = one.keys() | two.keys()
    return sum((one[key] * ratio - two[key] / ratio) ** 2 / (one[key] + two[key]) for key in keys)


@pytest.mark.parametrize("texts", [TEXTS, pytest.param(MANY, marks=pytest.mark.full)])
def test_the_distribution_is_the_same(
    model: LlamaForCausalLM, texts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "LEAST_NEW_TOKENS", 2)
    # Every pair comes in it, so that there are candidates behind any token.
    ids = torch.tensor([[token for one in range(8) for two in range(8) for token in (one, two)]])
    torch.manual_seed(1)
    expected = pairs(generated(model, ids.repeat(PLAIN, 1)))
    again = pairs(generated(model, ids.repeat(texts, 1)))
    liteboost_adaptor.apply(model, speculate="lookup")
    counts = Counts()
    found = pairs(torch.cat([generated(model, ids) for _ in range(texts)]))
    assert counts.served == texts and texts // 4 < counts.accepted < counts.proposed
    for ours, theirs, twice in zip(found, expected, again, strict=True):
        assert chi_square(twice, theirs) < BOUND, "the test itself"
        assert chi_square(ours, theirs) < BOUND


@pytest.mark.full
@drafts_here
def test_the_distribution_with_a_draft_model(
    model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft that is less sure than the model, and so often proposes what the model would not."""
    monkeypatch.setattr(refusals, "LEAST_NEW_TOKENS", 2)
    monkeypatch.setattr(draft, "bytes_of", lambda model: 0)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.mul_(0.3)
    other.save_pretrained(tmp_path)
    ids = torch.tensor([[1, 2, 3, 4]])
    torch.manual_seed(1)
    expected = pairs(generated(model, ids.repeat(PLAIN, 1)))
    liteboost_adaptor.apply(model, speculate=str(tmp_path))
    counts = Counts()
    found = pairs(torch.cat([generated(model, ids) for _ in range(DRAFTED)]))
    assert counts.served == DRAFTED and DRAFTED < counts.accepted < counts.proposed
    for ours, theirs in zip(found, expected, strict=True):
        assert chi_square(ours, theirs) < BOUND


def test_the_bound_finds_another_distribution() -> None:
    """Of a sampler that would take a candidate in one of ten more cases."""
    generator = torch.Generator().manual_seed(1)
    even, biased = (torch.randint(0, 8, (count, 2), generator=generator) for count in (PLAIN, TEXTS))
    biased[torch.rand(TEXTS, generator=generator) < 0.1] = torch.tensor([3, 4])
    one, two = (Counter(map(tuple, each.tolist())) for each in (even, biased))
    assert chi_square(one, two) > BOUND


def test_a_seed_gives_the_same_text_again(model: LlamaForCausalLM) -> None:
    ids = torch.tensor([[1, 2, 3, 1, 2, 3]])
    liteboost_adaptor.apply(model, speculate="lookup")
    texts = []
    for _ in range(2):
        torch.manual_seed(7)
        texts.append(
            model.generate(ids, max_new_tokens=30, do_sample=True, pad_token_id=0, eos_token_id=None)
        )
    assert torch.equal(*texts)
