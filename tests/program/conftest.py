"""Models that are called for one token after the other, and how often a recorded step served them."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import tiny_models

import liteboost_adaptor
from liteboost_adaptor.program import step as steps
from liteboost_adaptor.report import report


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Pair:
    """A model with recorded steps beside a copy that transformers runs, both decoding the same tokens.

    Attributes:
        ours, theirs: The models.
    """

    def __init__(self, family: str = "llama", device: str = "cpu", **settings: Any) -> None:
        liteboost_adaptor.undo()
        self.ours = tiny_models.build(family, **settings) if settings else tiny_models.build(family)
        self.ours.to(device)
        self.theirs = copy.deepcopy(self.ours)
        liteboost_adaptor.apply(self.ours, level=2)
        self.caches: list[Any] = [None, None]
        self._generator = torch.Generator().manual_seed(0)

    def tokens(self, rows: int, count: int) -> torch.Tensor:
        vocabulary = self.theirs.config.get_text_config().vocab_size
        ids = torch.randint(1, vocabulary, (rows, count), generator=self._generator)
        return ids.to(self.theirs.device)

    def start(self, rows: int = 1, count: int = 9) -> None:
        """Prefill."""
        ids = self.tokens(rows, count)
        self.caches = [model(ids, use_cache=True).past_key_values for model in (self.ours, self.theirs)]

    def step(self, rows: int = 1, **kwargs: Any) -> tuple[Any, Any]:
        """One more token: our output and theirs."""
        ids = self.tokens(rows, 1)
        return tuple(
            model(input_ids=ids, past_key_values=cache, use_cache=True, **kwargs)
            for model, cache in zip((self.ours, self.theirs), self.caches, strict=True)
        )

    def agree(self, steps: int = 1, rows: int = 1, tolerance: float = 2e-5, **kwargs: Any) -> None:
        """The logits of ``steps`` more tokens are the original's."""
        for _ in range(steps):
            ours, theirs = self.step(rows, **kwargs)
            error = (ours.logits.float() - theirs.logits.float()).norm() / theirs.logits.float().norm()
            assert error <= tolerance

    def both(self, change: Callable[[torch.nn.Module], Any]) -> list[Any]:
        return [change(model) for model in (self.ours, self.theirs)]


def served() -> int:
    """Steps that ran as programs so far."""
    return report.counter("step.program").calls


def reasons() -> dict[str, int]:
    """Why steps were not recorded."""
    return dict(report.counter("step.program").fallbacks)


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What steps warn of: `pytest.warns` sets filters, under which nothing is served that warns by itself."""
    texts: list[str] = []

    def warn(text: str, category: type[Warning], stacklevel: int) -> None:
        texts.append(f"{category.__name__}: {text}")

    monkeypatch.setattr(steps, "warnings", types.SimpleNamespace(warn=warn))
    return texts


@pytest.fixture
def recorded() -> Iterator[Pair]:
    """A Llama with a program that has served its last step."""
    pair = Pair()
    pair.start()
    pair.agree(6)
    before = served()
    pair.agree()
    assert served() == before + 1
    yield pair
    liteboost_adaptor.undo()
