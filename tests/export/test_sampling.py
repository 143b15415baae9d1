"""Draws have the distribution of transformers' processors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import runner
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

DRAWS = 20_000
SETTINGS: dict[str, dict[str, float]] = {
    "all": {},
    "temperature": {"temperature": 0.6},
    "top k": {"top_k": 12},
    "top p": {"top_p": 0.8},
    "repetition penalty": {"repetition_penalty": 1.7},
    "together": {"temperature": 1.4, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.3},
}


def expected(logits: torch.Tensor, prompt: list[int], settings: dict[str, float]) -> torch.Tensor:
    """What transformers draws by."""
    processors = LogitsProcessorList()
    if "repetition_penalty" in settings:
        processors.append(RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]))
    if "temperature" in settings:
        processors.append(TemperatureLogitsWarper(settings["temperature"]))
    if "top_k" in settings:
        processors.append(TopKLogitsWarper(int(settings["top_k"])))
    if "top_p" in settings:
        processors.append(TopPLogitsWarper(settings["top_p"]))
    return processors(torch.tensor([prompt]), logits[None].clone()).double().softmax(-1)[0]


def chances(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """How likely counts are that differ so much from what is expected: the chi-squared test."""
    mean = probabilities * counts.sum()
    large = mean >= 5
    rest = ~large & (mean > 0)
    found, wanted = counts[large].double(), mean[large]
    if mean[rest].sum() >= 5:
        found = torch.cat([found, counts[rest].sum()[None].double()])
        wanted = torch.cat([wanted, mean[rest].sum()[None]])
    statistic = ((found - wanted) ** 2 / wanted).sum()
    degrees = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, statistic / 2))


def drawn(opened: runner.Model, prompt: list[int], count: int, settings: dict[str, float]) -> torch.Tensor:
    ids = []
    for seed in range(count):
        opened.reset()
        opened.sample(**{"sample": 1, "top_k": 0, "top_p": 1.0, "temperature": 1.0, **settings, "seed": seed})
        opened.prefill(prompt)
        ids.append(opened.next()[0])
    return torch.tensor(ids)


def test_a_seed_gives_the_same_draws_and_another_others(windowed: tuple[torch.nn.Module, Path]) -> None:
    opened = runner.Model(windowed[1])

    def some(seed: int) -> list[int]:
        opened.sample(sample=1, top_k=0, seed=seed, temperature=2.0)
        opened.reset()
        opened.prefill([5, 6, 7])
        return [opened.next()[0] for _ in range(20)]

    assert some(1) == some(1) != some(2)
    opened.close()


def test_a_repetition_penalty_counts_for_the_most_likely_token_too(
    windowed: tuple[torch.nn.Module, Path],
) -> None:
    model, folder = windowed
    prompt = runner.prompt(model, 9)
    opened = runner.Model(folder)
    opened.sample(sample=0, repetition_penalty=1.5)
    opened.prefill(prompt)
    found = [opened.next()[0] for _ in range(20)]
    opened.close()
    result = model.generate(
        torch.tensor([prompt]), max_new_tokens=20, do_sample=False, repetition_penalty=1.5, eos_token_id=None
    )
    assert found == result[0, 9:].tolist() != runner.generated(model, prompt, 20)


@pytest.mark.full
@pytest.mark.parametrize("name", SETTINGS)
def test_draws_have_the_distribution_of_transformers(
    name: str, windowed: tuple[torch.nn.Module, Path]
) -> None:
    model, folder = windowed
    prompt, settings = runner.prompt(model, 6), SETTINGS[name]
    opened = runner.Model(folder)
    opened.prefill(prompt)
    probabilities = expected(opened.logits(), prompt, settings)
    counts = torch.bincount(drawn(opened, prompt, DRAWS, settings), minlength=len(probabilities))
    opened.close()
    assert not counts[probabilities == 0].any()
    assert chances(counts, probabilities) > 1e-3
    other = expected(torch.zeros(len(probabilities)), prompt, {})
    assert chances(counts, other) < 1e-9  # the test tells distributions apart
