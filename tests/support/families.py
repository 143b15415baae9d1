"""The families of models that tests go through, and how one of each is built and run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import coverage, tiny_models

CAUSAL = "Causal language models"
SECTIONS: dict[str, Callable[[], list[str]]] = {CAUSAL: tiny_models.families}

#: Families that transformers itself cannot build here from a tiny configuration.
NOT_BUILDABLE = {
    "gemma3n": "its vision tower needs timm; the text model is gemma3n_text",
    "gemma4_assistant": "a draft head; transformers' own validation refuses every small layout",
    "gemma4_unified_assistant": "as gemma4_assistant",
}


def buildable(section: str = CAUSAL) -> list[str]:
    """The families of a section that can be built."""
    return [family for family in SECTIONS[section]() if family not in NOT_BUILDABLE]


def text_run(model: torch.nn.Module) -> Callable[[], Any]:
    """Prefill of a left-padded text batch and two cached steps."""
    inputs = tiny_models.example_inputs(model, padding=3)
    return lambda: tiny_models.generate(model, inputs, new_tokens=3)


def measured(section: str) -> Iterator[coverage.Coverage]:
    """Coverage of every family of a section."""
    for family in buildable(section):
        model = tiny_models.build(family)
        yield coverage.measure(family, model, text_run(model))
