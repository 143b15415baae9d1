"""Every family that transformers batches continuously, with `LITEBOOST_BATCH_INVARIANT`: the bits of a call.

The oracle is the model without the package: where the log-probabilities of what `generate_batch` writes are
those of one call with the whole text, up to rounding in fp32, they have the same bits here, in fp32 and bf16.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from patches.test_batch_invariant_batching import batched, prompts, scored
from support import calls, families, tiny_models

import liteboost_adaptor

pytest.importorskip(
    "transformers.generation.continuous_batching.cache_allocators",
    reason="this transformers has another paged cache",
    exc_type=ImportError,
)

#: Of log-probabilities: what fp32 loses by another order of sums is below, another function above.
SAME_FUNCTION = 5e-5
#: Whose text has other log-probabilities in one call without us. The paged attention of transformers knows no
#: cap of logits (Gemma 2, VaultGemma) and no mask or bias of a model's own (Doge, XLNet).
ANOTHER_FUNCTION = {"doge", "gemma2", "moshi", "openai-gpt", "vaultgemma", "xlnet"}
BATCHED = set(
    """
    afmoe apertus apertus1p5_text arcee aria_text beam bitnet codegen cohere cohere2 cohere2_moe
    cohere_compass_text cwm dbrx diffllama dots1 emu3 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe
    flex_olmo flint gemma gemma3_text gemma3n_text glm glm4 glm4_moe gpt-sw3 gpt2 gpt_bigcode gpt_oss
    gptj granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense
    hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama mellum
    minimax_m2 ministral ministral3 mistral mixtral modernbert-decoder nanochat olmo olmo2 olmo3 olmoe
    persimmon phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_moe sarvam_moe seed_oss
    smollm3 solar_open starcoder2
    """.split()
)


def distances(model: Any) -> list[float] | None:
    """Of each request, how far its log-probabilities are from those of one call.

    ``None``: transformers does not batch it.
    """
    requests = prompts(model)
    try:
        found = batched(model, requests, new=12)
    except (AssertionError, ValueError, AttributeError, NotImplementedError):
        return None  # what transformers says of such a model differs; the test has the list
    if len(found) < len(requests):
        return None
    return [
        max(abs(a - b) for a, b in zip(logprobs, scored(model, prompt, tokens), strict=True))
        for prompt, (tokens, logprobs) in zip(requests, found, strict=True)
    ]


@pytest.mark.full
@pytest.mark.parametrize("family", families.buildable())
def test_generation_and_scoring_agree(family: str) -> None:
    with torch.no_grad():
        model = tiny_models.build(family).eval()
    try:
        model.config.vocab_size  # noqa: B018
    except AttributeError:
        assert family not in BATCHED
        return
    plain = distances(model)
    assert (plain is not None) == (family in BATCHED | ANOTHER_FUNCTION)
    if plain is None:
        return
    assert (max(plain) > SAME_FUNCTION) == (family in ANOTHER_FUNCTION), plain
    if family in ANOTHER_FUNCTION:
        return
    for dtype in (torch.float32, torch.bfloat16):
        model = families.cast(tiny_models.build(family).eval(), dtype)
        liteboost_adaptor.apply(model, batch_invariant=True)
        with calls.served() as served:
            found = distances(model)
        assert found == [0.0] * len(plain), f"{dtype}: {served.fallbacks}"
        liteboost_adaptor.undo(model)
