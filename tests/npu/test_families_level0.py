"""Families of causal language models on an NPU give the CPU's fp32 logits and tokens, at every level."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import families, tiny_models

import liteboost_adaptor

STEPS = 8  # of which the last run as recorded at level 2
TOLERANCE = 1e-4
#: A token chosen by less may be another one: logits differ by up to the tolerance on either side.
MARGIN = 2 * TOLERANCE

#: One of each kind: attention with and without an interface, masks, positions, experts, states, activations.
SAMPLE = (
    *("llama", "qwen3", "gemma3_text", "gpt2", "gpt_neox", "bart", "bloom", "falcon", "starcoder2", "doge"),
    *("deepseek_v2", "deepseek_v3", "llama4_text", "gpt_oss", "mixtral", "olmo3", "mamba2", "qwen3_next"),
    *("minimax_m3_vl_text", "phi3", "recurrent_gemma"),
)
#: Families that compute something else on another device, in transformers too.
NOT_COMPARABLE = {"reformer": "its hash draws its random projections on the device"}


def marked(family: str) -> Any:
    marks = [] if family in SAMPLE else [pytest.mark.full]
    if family in NOT_COMPARABLE:
        marks.append(pytest.mark.skip(reason=NOT_COMPARABLE[family]))
    return pytest.param(family, marks=marks)


pytestmark = pytest.mark.usefixtures("no_grad", "undone")


def run(model: torch.nn.Module, device: str) -> list[torch.Tensor]:
    """Logits of a left-padded batch, then tokens and logits of greedy decoding with a cache.

    Of its real positions: at a padded one, which sees no key, attention gives what it likes, and nothing
    reads it.
    """
    inputs = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in tiny_models.example_inputs(model, padding=3).items()
    }
    logits = families.prefill(model, dict(inputs))
    mask = inputs.get("attention_mask")
    if mask is not None and logits.shape[:2] == mask.shape:
        logits = logits[mask.bool()]
    return [logits.cpu(), *(each.cpu() for each in families.decode(model, inputs, STEPS))]


@pytest.mark.parametrize("family", [marked(family) for family in families.buildable()])
def test_a_family_is_the_same_on_an_npu(family: str) -> None:
    model = tiny_models.build(family)
    # Where torch_npu is there transformers drops additive biases on the CPU, too, but for this.
    liteboost_adaptor.apply(level=0)
    logits, tokens, step_logits = run(model, "cpu")
    best = step_logits.topk(2, dim=-1).values
    is_clear = (best[..., 0] - best[..., 1]).reshape(tokens.shape) > MARGIN
    model = tiny_models.build(family).to("npu")
    for level in (0, 1, 2):
        if level:
            liteboost_adaptor.undo()
            liteboost_adaptor.apply(level=level)
        found = run(model, "npu")
        assert (found[0] - logits).abs().max() <= TOLERANCE, f"level {level}"
        # After a token that was not clear, the texts may part.
        compared = is_clear.cumprod(dim=-1).bool()
        assert torch.equal(found[1][compared], tokens[compared]), f"level {level}"
        assert compared.float().mean() > 0.5
