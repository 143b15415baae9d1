"""Decoders beside an encoder on an NPU: their logits are those of a CPU, and recorded steps make them."""

from __future__ import annotations

import copy

import pytest
import torch
from program import test_encoder_decoder as on_cpu
from program.conftest import reasons, served

import liteboost_adaptor

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("no_grad", "undone")]

Inputs = dict[str, torch.Tensor]


def there(inputs: Inputs) -> Inputs:
    return {name: each.npu() for name, each in inputs.items()}


def padded(length: int, *paddings: int) -> Inputs:
    """A text a row, of which the last ``paddings`` tokens are none."""
    inputs = on_cpu.inputs_of("T5", len(paddings), length, length)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    for row, padding in enumerate(paddings):
        inputs["attention_mask"][row, length - padding :] = 0
    return inputs


def agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found.cpu() - expected).abs().max() <= 2e-5 * expected.abs().max())


@pytest.mark.parametrize("family", ["Whisper", "T5", "MT5", "UMT5", "LongT5", "Bart", "Marian"])
def test_texts_are_those_of_a_cpu_and_one_program_makes_them_whatever_is_padded(family: str) -> None:
    model, device = (on_cpu.build(family) for _ in range(2))
    if family == "Whisper":
        given = [on_cpu.inputs_of(family, 2, length, length) for length in (9, 14)]
    else:
        given = [padded(9, 0, 2), padded(14, 0, 2), padded(14, 5, 0), padded(14, 0, 0), padded(14, 1, 9)]
    expected = [on_cpu.logits_of(model, inputs, 24) for inputs in given]
    if family != "Whisper":  # what is padded shows, by more than rounding
        assert not agree(expected[1], expected[2]) and not agree(expected[2], expected[3])
    liteboost_adaptor.apply(level=2)
    device.npu()
    before, noted = served(), reasons()
    for inputs, logits in zip(given, expected, strict=True):
        assert agree(on_cpu.logits_of(device, there(inputs), 24), logits)
    assert served() - before >= 23 * len(given) - 10
    assert reasons().get("recorded", 0) - noted.get("recorded", 0) == 1


@pytest.mark.parametrize(
    "family", ["T5", "LongT5"]
)  # of the latter attention is written out, with a float mask
def test_padding_that_changes_within_a_text_is_seen_by_the_next_step(family: str) -> None:
    model = on_cpu.build(family)
    device = copy.deepcopy(model).npu()
    inputs = padded(11, 0, 3)
    liteboost_adaptor.apply(level=2)
    mask, caches = inputs["attention_mask"], [None, None]
    masks = [mask, mask.npu()]
    encoded = [model.encoder(**inputs), device.encoder(**there(inputs))]

    def step(token: int) -> int:
        """A step of both models agrees; how many of them a program served."""
        before, logits = served(), []
        for which, each in enumerate((model, device)):
            ids = torch.full((2, 1), token, device=each.device)
            made = each(
                decoder_input_ids=ids,
                encoder_outputs=encoded[which],
                past_key_values=caches[which],
                attention_mask=masks[which],
                use_cache=True,
            )
            caches[which] = made.past_key_values
            logits.append(made.logits.cpu())
        assert agree(*logits[::-1])
        return served() - before

    liteboost_adaptor.apply(model, level=0)
    for token in range(10):
        count = step(token + 5)
    assert count == 1
    for each in masks:  # the same tensor, with other values
        each[0, 6:] = 0
    assert [step(token) for token in (20, 21)] == [1, 1]
    other = torch.ones_like(mask)
    other[1, :7] = 0
    masks[:] = other, other.npu()
    assert [step(token) for token in (30, 31)] == [1, 1]
    masks[:] = torch.ones_like(mask), torch.ones_like(mask).npu()
    assert [step(token) for token in (40, 41)] == [1, 1]
