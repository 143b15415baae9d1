"""What is served in which releases of transformers; the text is the one without in all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import tiny_models
from torch import nn

from liteboost_adaptor.huggingface.speculation import loop, refusals

from .speculating import HAS_PREFILL, IS_SERVED, Counts, both, repeating

FIRST = "a transformers of the first 5.x releases"


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return tiny_models.build("llama", seed=1)


@pytest.mark.parametrize("kind", ["lookup", "a draft model"])
def test_this_release(llama: nn.Module, tmp_path: Path, kind: str) -> None:
    llama.save_pretrained(tmp_path)
    reason = "" if IS_SERVED else FIRST
    if kind == "a draft model" and not HAS_PREFILL:
        reason = "a draft model needs transformers 5"
    for more in ({}, {"repetition_penalty": 1.3}, {"eos_token_id": 40}, {"min_new_tokens": 30}):
        counts = Counts()
        speculate = "lookup" if kind == "lookup" else str(tmp_path)
        expected, found = both(llama, repeating(), speculate, **more)
        assert torch.equal(found, expected)
        assert counts.served == (not reason) and counts.reasons == ({reason: 1} if reason else {})


def test_releases_between_those_that_are_tried(llama: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (loop.PREFILL, refusals._POSITIONS):
        monkeypatch.setattr(type(llama), name, None, raising=False)
    assert refusals.why_not(llama, repeating(), {}) == FIRST
