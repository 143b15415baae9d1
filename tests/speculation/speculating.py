"""Texts with and without speculation, and what the status counts of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.generation.utils import GenerationMixin

import liteboost_adaptor
from liteboost_adaptor.huggingface import speculation
from liteboost_adaptor.huggingface.speculation import loop, refusals
from liteboost_adaptor.report import Row, report

RULE = speculation.RULE
#: Whether this release of transformers is one that is served, and with draft models, and so can be tested; of
#: the others `test_releases.py` says that they run the original.
HAS_PREFILL = hasattr(GenerationMixin, loop.PREFILL)
IS_SERVED = not (HAS_PREFILL and hasattr(GenerationMixin, refusals._POSITIONS))
served_here = pytest.mark.skipif(not IS_SERVED, reason="this transformers runs the original")
drafts_here = pytest.mark.skipif(not HAS_PREFILL, reason="this transformers has no draft models of ours")
#: Tokens that a test generates: more than the least that are served.
NEW_TOKENS = 40


def repeating(vocabulary: int = 60, times: int = 4) -> torch.Tensor:
    """A prompt that says the same several times."""
    once = torch.randint(32, vocabulary, (1, 9), generator=torch.Generator().manual_seed(4))
    return once.repeat(1, times)


def settings(**more: Any) -> dict[str, Any]:
    return {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **more}


def text(model: nn.Module, ids: torch.Tensor, **more: Any) -> Any:
    return model.generate(ids, **settings(**more))


def both(model: nn.Module, ids: torch.Tensor, speculate: str = "lookup", **more: Any) -> tuple[Any, Any]:
    """What `generate` gives, served, without and with speculation."""
    liteboost_adaptor.apply(model, speculate="off")
    expected = text(model, ids, **more)
    liteboost_adaptor.apply(model, speculate=speculate)
    return expected, text(model, ids, **more)


class Counts:
    """What is counted from here on: served texts, reasons, and what became of candidates."""

    def __init__(self) -> None:
        counter = report.counter(RULE)
        self._calls, self._fallbacks = counter.calls, counter.fallbacks.copy()
        self._totals = list(speculation._totals)

    @property
    def served(self) -> int:
        return report.counter(RULE).calls - self._calls

    @property
    def reasons(self) -> dict[str, int]:
        return dict(report.counter(RULE).fallbacks - self._fallbacks)

    def _total(self, at: int) -> int:
        return speculation._totals[at] - self._totals[at]

    @property
    def steps(self) -> int:
        return self._total(0)

    @property
    def proposed(self) -> int:
        return self._total(1)

    @property
    def accepted(self) -> int:
        return self._total(2)

    @property
    def pauses(self) -> int:
        return self._total(3)


def rows() -> list[Row]:
    return [row for row in liteboost_adaptor.status().rules if row.id == RULE]
