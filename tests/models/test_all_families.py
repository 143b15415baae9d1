"""Every causal-LM and image-text family of transformers, whether or not a rule is meant for it."""

from __future__ import annotations

import pytest
import torch
from support import families, families_images, numbers, state, tiny_models

import liteboost_adaptor
from liteboost_adaptor.report import report

TOLERANCE = 2e-5
FAMILIES = families.buildable()
IMAGE_TEXT = [name for name in families.buildable(families.IMAGE_TEXT) if name not in families.NEEDS_IMAGE]


#: Causal families whose decode steps are not run as programs.
UNRECORDED = {
    **dict.fromkeys(("blt", "cpmant", "openai-gpt", "xlm", "xlnet"), "a step takes all tokens again"),
    **dict.fromkeys(("reformer", "rwkv", "xlstm", "musicgen_melody"), "no cache of layers is handed in"),
    **dict.fromkeys(("dbrx", "jetmoe", "qwen4_exp", "qwen4_exp_text", "xmod"), "reads values"),
    **dict.fromkeys(("gemma3n_text", "roc_bert"), "decides by a value behind a write to what is kept"),
    "deepseek_v4": "what the cache keeps grows in a way of its own",
    "minimax": "the cache keeps a list",
    "musicgen": "draws random numbers",
    "prophetnet": "what is kept moves",
    "recurrent_gemma": "changes an attribute of the model",
}


@pytest.mark.parametrize("family", sorted(families.NOT_BUILDABLE))
def test_families_left_out_cannot_be_built_or_run_on_text(family: str) -> None:
    with pytest.raises(Exception):  # noqa: B017 - whatever each of them has against it
        families.text_run(tiny_models.build(family))()


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_logits_and_greedy_tokens_are_the_originals_at_every_level(family: str) -> None:
    """Prefill, and eight cached steps of a left-padded batch of three; level 0 to the bit."""
    model = tiny_models.build(family)
    steps = report.tally("step.program")
    before = steps.calls
    check(
        model, families.inputs_of(model, 12, (0, 0)), families.inputs_of(model, 13, (0, 3, 6)), 8, (0, 1, 2)
    )
    assert (steps.calls > before) == (family not in UNRECORDED), steps.fallbacks


@pytest.mark.parametrize("family", IMAGE_TEXT)
def test_text_decoders_of_image_text_families_are_served_like_causal_models(family: str) -> None:
    model = tiny_models.build(family)
    check(model, families.inputs_of(model, 12, (0, 0)), families.inputs_of(model, 13, (0, 3, 6)), 4, (2,))


@pytest.mark.parametrize("family", families_images.FAMILIES)
def test_logits_of_an_image_and_a_text_are_the_originals(family: str) -> None:
    model = tiny_models.build(family)
    inputs = families_images.image_inputs(model)
    darker = inputs | {"pixel_values": inputs["pixel_values"] / 2}
    assert not torch.equal(families.prefill(model, inputs), families.prefill(model, darker)), "image not read"
    check(model, inputs, inputs, 4, (2,))


def check(model: torch.nn.Module, plain: dict, padded: dict, count: int, levels: tuple[int, ...]) -> None:
    """Prefill of ``plain`` and ``count`` cached steps after ``padded`` are the original's at these levels."""
    expected = families.prefill(model, plain)
    tokens, steps = families.decode(model, padded, count)
    # Tokens are the original's unless two logits are nearer than the tolerance; what follows may differ then.
    certain = numbers.certain(numbers.Greedy(tokens, steps), 2 * TOLERANCE * steps.abs().max().item())
    for level in levels:
        liteboost_adaptor.apply(model, level=level)
        found = families.prefill(model, plain)
        greedy, found_steps = families.decode(model, padded, count)
        if not torch.equal(greedy, tokens):
            assert torch.equal(greedy[certain], tokens[certain]), f"level {level}"
            _, found_steps = families.decode(model, padded, count, forced=tokens)
        if level == 0:
            assert torch.equal(found, expected) and torch.equal(found_steps, steps)
        rows = state.rows()
        assert "failed" not in rows, [row.reason for row in rows["failed"]]
        assert numbers.relative(found, expected) <= TOLERANCE, f"prefill, level {level}"
        assert numbers.relative(found_steps, steps) <= TOLERANCE, f"cached decode, level {level}"
    liteboost_adaptor.undo()
    assert not any("__liteboost__" in vars(type(part)) for part in model.modules())
    assert torch.equal(families.prefill(model, plain), expected)
