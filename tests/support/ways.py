"""One way of using a model: run without us, with us, and after undo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import liteboost_adaptor

from . import calls, numbers

#: Largest relative difference from the unpatched model in fp32.
TOLERANCE = 2e-5


#: One family of each kind: of norm, rotation, attention, experts and mixer.
FAMILIES = (
    "llama",
    "gpt2",
    "gemma2",
    "mixtral",
    "gpt_neox",
    "gpt_oss",
    "qwen3_next",
    "deepseek_v3",
    "mamba2",
)


def families(*names: str, later: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Run a test on each family; those in ``later`` in the second tier, where the way is slow."""
    return pytest.mark.parametrize(
        "family", [*names, *(pytest.param(name, marks=pytest.mark.full) for name in later)]
    )


@dataclass
class Runs:
    """What one way gave without us and with us, and what our replacements did meanwhile."""

    expected: Any
    found: Any
    served: calls.Served

    @property
    def reasons(self) -> set[str]:
        """Why calls fell back to the original; a step that is not recorded still calls our ops."""
        return {why for rule, why in self.served.fallbacks if rule != "step.program"}

    def assert_close(self, tolerance: float = TOLERANCE) -> None:
        """Every tensor is the original's: integers exactly, numbers within ``tolerance``."""
        expected, found = leaves(self.expected), leaves(self.found)
        assert len(found) == len(expected) > 0
        for ours, original in zip(found, expected, strict=True):
            assert ours.shape == original.shape and ours.dtype == original.dtype
            if original.is_floating_point():
                assert numbers.relative(ours, original) <= tolerance
            else:
                assert torch.equal(ours, original)

    def assert_same_text(self) -> None:
        """Both are `numbers.Greedy`: tokens agree wherever the margins decide, and so do their logits."""
        expected, found = self.expected, self.found
        certain = numbers.certain(expected, 2 * TOLERANCE * expected.logits.abs().max().item())
        assert certain.float().mean() > 0.5, "the model is too undecided to show anything"
        assert torch.equal(found.tokens[certain], expected.tokens[certain])
        assert numbers.relative(found.logits[certain], expected.logits[certain]) <= TOLERANCE


def leaves(result: Any) -> list[torch.Tensor]:
    """The tensors of a nested result, in order."""
    if isinstance(result, numbers.Greedy):
        return [result.tokens, result.logits]
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, (tuple, list)):
        return [leaf for part in result for leaf in leaves(part)]
    return [result] if isinstance(result, torch.Tensor) else []


def compare(model: torch.nn.Module, level: int, run: Callable[[], Any]) -> Runs:
    """``run()`` without us, with ``model`` served, and after undo, which must restore every bit."""
    expected = run()
    classes = [type(part) for part in model.modules()]
    liteboost_adaptor.apply(model, level=level)
    with calls.served() as served:
        found = run()
    liteboost_adaptor.undo(model)
    assert [type(part) for part in model.modules()] == classes
    again = run()
    for after, before in zip(leaves(again), leaves(expected), strict=True):
        assert torch.equal(after, before), "undo did not restore the original"
    return Runs(expected, found, served)
