"""Decoders beside an encoder on an NPU: their logits are those of a CPU, if by recorded steps or not."""

from __future__ import annotations

import copy

import pytest
from program import test_encoder_decoder as on_cpu
from program.conftest import reasons, served

import liteboost_adaptor

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("no_grad", "undone")]

READS = "reads values (aten._local_scalar_dense.default)"


@pytest.mark.parametrize("family", ["Whisper", "T5"])
def test_texts_are_those_of_a_cpu(family: str) -> None:
    model = on_cpu.build(family)
    liteboost_adaptor.apply(model, level=0)
    given = [on_cpu.inputs_of(family, 2, length, length) for length in (9, 14)]
    expected = [on_cpu.logits_of(model, inputs, 24) for inputs in given]
    device = copy.deepcopy(model).npu()
    liteboost_adaptor.apply(device, level=2)
    before, noted = served(), reasons()
    for inputs, logits in zip(given, expected, strict=True):
        found = on_cpu.logits_of(device, {name: each.npu() for name, each in inputs.items()}, 24).cpu()
        assert (found - logits).abs().max() <= 2e-5 * logits.abs().max()
    if family == "Whisper":
        assert served() - before >= 30
    else:  # whether the encoder's text is padded is read from its mask, for which a run would wait
        new = reasons().get(READS, 0) - noted.get(READS, 0)
        assert served() == before and new > 30
