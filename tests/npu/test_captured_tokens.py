"""300 tokens of captured steps are those of level 0: over the end of a window, while caches grow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from npu.test_captured_steps import UNTIL, reasons, replays
from npu.test_steps import at_level
from program.conftest import served
from support import numbers
from transformers import Qwen2Config, Qwen2ForCausalLM

import liteboost_adaptor

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("no_grad", "undone")]

NEW, WINDOW, LENGTH, PADDING, VOCABULARY = 300, 100, 9, 4, 32
SETTINGS = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
Inputs = dict[str, torch.Tensor]


def model_of(dtype: torch.dtype) -> Qwen2ForCausalLM:
    """One layer that sees all tokens and one with a window; the weights are those of bf16."""
    torch.manual_seed(0)
    config = Qwen2Config(
        **{"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
        **{"intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": VOCABULARY},
        **{"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    )
    assert config.layer_types == ["full_attention", "sliding_attention"]
    model = Qwen2ForCausalLM(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.mul_(6)
    return model.bfloat16().to(dtype)


def prompts(rows: int) -> Inputs:
    """Half of them padded."""
    ids = torch.randint(3, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[: rows // 2, :PADDING], ids[: rows // 2, :PADDING] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def clearest() -> Inputs:
    """Three prompts, the first padded, whose tokens in fp32 are followed by none that is nearly as likely."""
    inputs = prompts(128)
    found = model_of(torch.float32).generate(
        **inputs, **SETTINGS, output_logits=True, return_dict_in_generate=True
    )
    first, second = torch.stack(found.logits, 1).topk(2, -1).values.unbind(-1)
    padded, whole = (first - second).amin(1).chunk(2)
    chosen = torch.cat([padded.topk(1).indices, whole.topk(2).indices + len(padded)])
    return {name: value[chosen] for name, value in inputs.items()}


def on_npu(inputs: Inputs, *rows: int) -> Inputs:
    return {name: value[list(rows)].npu() for name, value in inputs.items()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_tokens_are_those_of_level_0_while_batches_change(dtype: torch.dtype) -> None:
    inputs, model = clearest(), model_of(dtype).npu()
    batches = [on_npu(inputs, *rows) for rows in ((1,), (0, 2, 1), (2,))]

    def decoded() -> list[list[int]]:
        return [model.generate(**each, **SETTINGS).tolist() for each in batches]

    expected = at_level(0, decoded)
    assert len({token for batch in expected for row in batch for token in row}) > VOCABULARY // 2
    liteboost_adaptor.apply(level=2)
    replayed, from_program = replays(), served()
    assert decoded() == expected
    # But for the steps before a batch of a size is captured, and a few that look again.
    steps = len(batches) * NEW - 2 * UNTIL - 40
    assert served() - from_program >= steps
    if dtype == torch.float16:  # fp32 is not captured
        assert replays() - replayed >= steps, reasons()


def test_bf16_tells_apart_what_level_0_tells_apart() -> None:
    inputs, model = prompts(4), model_of(torch.bfloat16).npu()
    settings: dict[str, Any] = SETTINGS | {"output_logits": True, "return_dict_in_generate": True}
    liteboost_adaptor.apply(level=2)
    before = replays()
    found = model.generate(**on_npu(inputs, 0, 1, 2, 3), **settings)
    assert replays() - before >= NEW - UNTIL - 10, reasons()
    liteboost_adaptor.undo()
    ids = found.sequences[:, :-1].cpu()
    mask = torch.cat([inputs["attention_mask"], torch.ones(4, NEW - 1, dtype=torch.long)], 1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    whole = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    with liteboost_adaptor.patched(level=0):
        own = model(**{name: value.npu() for name, value in whole.items()}).logits
    exact = model_of(torch.float32)(**whole).logits[:, LENGTH - 1 :]
    own, ours = own[:, LENGTH - 1 :].cpu().float(), torch.stack(found.logits, 1).cpu().float()
    assert numbers.relative(ours, exact) <= 1.5 * numbers.relative(own, exact)
    first, second = exact.topk(2, -1).values.unbind(-1)
    is_clear = first - second > 2 * (own - exact).abs().amax()
    assert is_clear.float().mean() > 0.6
    chosen = found.sequences[:, LENGTH:].cpu()
    assert torch.equal(chosen[is_clear], own.argmax(-1)[is_clear])
