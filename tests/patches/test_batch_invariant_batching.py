"""`LITEBOOST_BATCH_INVARIANT` in continuous batching: log-probabilities have the bits of scoring."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import calls, families, tiny_models

import liteboost_adaptor
from liteboost_adaptor.huggingface import paged

pytest.importorskip(
    "transformers.generation.continuous_batching.cache_allocators",
    reason="this transformers has another paged cache",
    exc_type=ImportError,
)

from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig

#: Plain; norms in the attention; a window in some layers or all; sinks and experts; experts.
FAMILIES = ["llama", "qwen3", "gemma3_text", "mistral", "gpt_oss", "qwen3_moe"]
#: Of requests: one token, less than a page, its end, several pages, more than a batch takes at once.
LENGTHS = (1, 3, 15, 16, 17, 40, 61, 150)
#: More than windows are long.
NEW = 40


def prompts(model: Any) -> list[list[int]]:
    generator = torch.Generator().manual_seed(17)
    made = [
        torch.randint(3, model.config.vocab_size, (each,), generator=generator).tolist() for each in LENGTHS
    ]
    return [*made, made[-1][:140] + made[2]]  # whose first pages are another's


def batched(
    model: Any, requests: list[list[int]], new: int = NEW, **config: Any
) -> list[tuple[list[int], list[float]]]:
    """Tokens of each request, and the log-probability of each."""
    config = {"page_size": 128, "num_blocks": 100, "max_batch_tokens": 64, "return_logprobs": True, **config}
    outputs = model.generate_batch(
        requests,
        generation_config=GenerationConfig(
            max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(**config),
        warmup=False,
    )
    assert not any(each.error for each in outputs.values())
    return [(each.generated_tokens, each.logprobs) for each in outputs.values()]


def scored(model: Any, prompt: list[int], new: list[int]) -> list[float]:
    """Log-probabilities of ``new`` behind ``prompt``, in one call."""
    ids = torch.tensor([[*prompt, *new]])
    with torch.no_grad():
        scores = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    return scores.softmax(-1).gather(1, torch.tensor(new)[:, None]).log().flatten().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_and_scoring_agree(family: str, dtype: torch.dtype) -> None:
    model = tiny_models.build(family).eval()
    families.cast(model, dtype)
    liteboost_adaptor.apply(model, batch_invariant=True)
    requests = prompts(model)
    with calls.served() as served:
        expected = batched(model, requests)
    assert any(served.rules[rule] for rule in ("paged.sdpa", "paged.eager")), served.rules
    windows = served.fallbacks["step.program", paged.RINGS]
    assert served.rules["step.program"] > NEW - 10 or windows > NEW - 10, served.fallbacks
    for prompt, (tokens, found) in zip(requests, expected, strict=True):
        assert found == scored(model, prompt, tokens), f"a prompt of {len(prompt)}"
    assert batched(model, requests) == expected, "recorded from the first step on"
    assert batched(model, requests, page_size=20, num_blocks=400) == expected, "other pages"
    assert batched(model, requests, max_batch_tokens=24) == expected, "other chunks of prompts"
    assert batched(model, requests[::-1]) == expected[::-1], "another order"
    assert batched(model, requests[4:5]) == expected[4:5], "alone"


@pytest.mark.parametrize(("window", "page"), [(24, 16), (40, 16), (150, 128)])
@pytest.mark.parametrize("family", ["gemma3_text", "mistral"])
def test_windows_of_several_pages(family: str, window: int, page: int) -> None:
    """No multiple of a page, so that one which is not whole goes round in the ring."""
    config = tiny_models.tiny_config(family)
    config.sliding_window = window
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    liteboost_adaptor.apply(model, batch_invariant=True)
    requests = prompts(model)
    together = batched(model, requests, new=60, page_size=page, num_blocks=400)
    for prompt, expected in zip(requests[-4:], together[-4:], strict=True):
        (alone,) = batched(model, [prompt], new=60, page_size=page, num_blocks=400)
        assert alone == expected
        assert expected[1] == scored(model, prompt, expected[0]), f"a prompt of {len(prompt)}"
