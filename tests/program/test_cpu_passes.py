"""Layers with one input are one operator of a program, and views none: the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from support import tiny_models

import liteboost_adaptor
from liteboost_adaptor.ops.quantized_linear import prepack, prepack_scales
from liteboost_adaptor.program import lower
from liteboost_adaptor.program.cpu_passes import plain_view, share_out
from liteboost_adaptor.program.recording import Call, Length, Recording, Slot

aten, ours = torch.ops.aten, torch.ops.liteboost


def layer(recording: Recording, x: int, outputs: int = 24, **changed: Any) -> Call:
    """``linear_packed`` of what is in slot ``x``."""
    tiles = prepack(torch.randint(-9, 9, (outputs, 16), dtype=torch.int8))
    slots = [recording.new(), recording.new()]
    recording.constants |= dict(zip(slots, (tiles, prepack_scales(torch.rand(outputs))), strict=True))
    args = [Slot(x), *map(Slot, slots), None, changed.get("bias"), outputs]
    return Call(ours.linear_packed.default, tuple(args), {}, [recording.new()])


def names(recording: Recording) -> list[str]:
    return [call.function.name().split("::")[1] for call in recording.calls]


def test_layers_with_one_input_are_made_at_once_where_the_first_was() -> None:
    recording = Recording()
    x, other = recording.new(), recording.new()
    first, second, third, alone = (
        layer(recording, x, 24),
        layer(recording, x, 40),
        layer(recording, x, 16),
        layer(recording, other),
    )
    norm = Call(ours.rms_norm.default, (Slot(first.results[0]), None, 1e-6), {}, [recording.new()])
    recording.calls = [first, norm, alone, second, third]
    share_out(recording)
    assert names(recording) == ["_linears_packed", "rms_norm", "linear_packed"]
    merged = recording.calls[0]
    assert merged.is_list and merged.results == [each.results[0] for each in (first, second, third)]
    assert merged.args[0] == Slot(x) and merged.args[-2:] == ([24, 40, 16], False)
    assert merged.args[1] == [each.args[1] for each in (first, second, third)]


def test_layers_are_made_at_once_with_others_of_their_kind() -> None:
    recording = Recording()
    x, weight, scales, bias = (recording.new() for _ in range(4))
    recording.constants |= {weight: torch.randn(4, 8), scales: torch.rand(4), bias: torch.randn(4)}
    plain, rounded = ours.linear.default, ours.linear_w8a8.default
    args = [(weight,), (weight, scales), (weight, bias), (weight, scales, bias)]
    recording.calls = [
        Call(of, (Slot(x), *map(Slot, rest)), {}, [recording.new()])
        for of, rest in zip((plain, rounded, plain, rounded), args, strict=True)
    ]
    share_out(recording)
    assert names(recording) == ["_linears", "_linears_w8a8"]
    w, s, b = map(Slot, (weight, scales, bias))
    assert recording.calls[0].args == (Slot(x), [w, w], [None, b])
    assert recording.calls[1].args == (Slot(x), [w, w], [s, s], [None, b])


def test_layers_of_another_device_are_left_to_its_own_passes() -> None:
    recording = Recording()
    x, weight, scales = (recording.new() for _ in range(3))
    recording.constants |= {weight: torch.empty(4, 8, device="meta"), scales: torch.empty(4, device="meta")}
    products = [(ours.linear.default, (weight,)), (ours.linear_w8a8.default, (weight, scales))]
    recording.calls = [
        Call(of, (Slot(x), *map(Slot, rest)), {}, [recording.new()])
        for of, rest in products
        for _ in range(2)
    ]
    share_out(recording)
    assert names(recording) == ["linear"] * 2 + ["linear_w8a8"] * 2


def test_layers_that_round_their_input_are_made_at_once_among_themselves() -> None:
    recording = Recording()
    x = recording.new()
    calls = [layer(recording, x, outputs) for outputs in (24, 40, 16, 8)]
    for call in calls[::2]:
        call.function = ours.linear_w4a8.default
    recording.calls = calls
    share_out(recording)
    assert names(recording) == ["_linears_packed", "_linears_packed"]
    assert [call.args[-2:] for call in recording.calls] == [([24, 16], True), ([40, 8], False)]


def test_what_is_not_known_earlier_stays_where_it_is() -> None:
    recording = Recording()
    x, made = recording.new(), recording.new()
    bias = Call(aten.relu.default, (Slot(x),), {}, [made])
    recording.calls = [layer(recording, x), bias, layer(recording, x, bias=Slot(made))]
    share_out(recording)
    assert names(recording) == ["linear_packed", "relu", "linear_packed"]
    written = Call(aten.relu_.default, (Slot(x),), {}, [made])
    recording.calls = [layer(recording, x), written, layer(recording, x)]
    share_out(recording)
    assert names(recording) == ["linear_packed", "relu_", "linear_packed"]


def test_a_view_is_told_from_a_copy() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    shapes = {0: x, 1: x.transpose(0, 1), 2: x.select(1, 2), 3: x.transpose(0, 1).reshape(6, 4)}
    turned = Call(aten.transpose.int, (Slot(0), 0, 1), {}, [1])
    assert plain_view(turned, shapes) == [0, 3, 3, 2, 4, 4, 12, 1]
    chosen = Call(aten.select.int, (Slot(0), 1, 2), {}, [2])
    assert plain_view(chosen, shapes) == [8, 2, 2, 4, 12, 1]
    assert (
        plain_view(Call(aten.reshape.default, (Slot(1), [6, 4]), {}, [3]), shapes) is None
    )  # not contiguous
    shapes[4] = shapes[1].contiguous()
    assert plain_view(Call(aten.reshape.default, (Slot(4), [6, 4]), {}, [3]), shapes) is None  # a copy
    assert plain_view(Call(aten.relu.default, (Slot(0),), {}, [0]), shapes) is None


def test_a_view_that_moves_with_a_length_stays_an_operator() -> None:
    x, length = torch.arange(24.0).reshape(4, 6), Length(sympy.Symbol("s0"))
    shapes = {0: x, 1: x[2:3], 2: x[2]}
    assert plain_view(Call(aten.slice.Tensor, (Slot(0), 0, 2, 3), {}, [1]), shapes) == [12, 2, 1, 6, 6, 1]
    assert plain_view(Call(aten.slice.Tensor, (Slot(0), 0, length, 3), {}, [1]), shapes) is None
    assert plain_view(Call(aten.select.int, (Slot(0), 0), {"index": length}, [2]), shapes) is None
    assert plain_view(Call(aten.view.default, (Slot(0), [length, 6]), {}, [1]), shapes) is None


@pytest.mark.parametrize(
    ("quant", "operator", "in_a_layer"),
    [
        (None, "_linears", 1),  # gate and up are one operator already
        ("w8a8", "_linears_w8a8", 2),
        *((quant, "_linears_packed", 2) for quant in ("w8a16", "w4a16,asymmetric", "w4a8")),
    ],
)
@pytest.mark.parametrize("rows", [1, 3])
def test_the_program_of_a_model_gives_the_bits_of_its_layers(
    monkeypatch: pytest.MonkeyPatch, quant: str | None, operator: str, in_a_layer: int, rows: int
) -> None:
    texts: list[str] = []
    text = lower.Writer.text
    monkeypatch.setattr(lower.Writer, "text", lambda self: texts.append(text(self)) or texts[-1])
    liteboost_adaptor.undo()
    model = tiny_models.build("qwen3").bfloat16()
    liteboost_adaptor.apply(model, quant=quant)
    ids = torch.randint(1, 90, (rows, 7), generator=torch.Generator().manual_seed(0))
    settings = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    found = model.generate(ids, **settings, output_logits=True, return_dict_in_generate=True)
    layers = model.config.num_hidden_layers
    assert texts and texts[-1].count(f"::{operator} ") == in_a_layer * layers
    assert "aten::view" not in texts[-1] and "aten::transpose" not in texts[-1]
    with liteboost_adaptor.patched(model, disable="step.program"):
        plain = model.generate(ids, **settings, output_logits=True, return_dict_in_generate=True)
    for ours_, theirs in zip(found.logits, plain.logits, strict=True):
        assert torch.equal(ours_, theirs)
