"""Decode steps on an NPU run as programs: the same tokens, and every change between two of them is seen."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cann_sim.trace import recording
from program.conftest import Pair, reasons, served
from program.test_guards import CHANGES
from support import llamas
from transformers import LlamaForCausalLM

import liteboost_adaptor
from liteboost_adaptor.program import step as steps
from liteboost_adaptor.report import report

SEEN = (
    *("a hook", "a hook on a leaf", "a forward of its own", "another child", "an adapter"),
    *("a weight's data, in place", "a weight", "an optimizer step", "loaded and assigned values"),
    *("a class", "a number", "a buffer", "another buffer", "the configuration"),
)


pytestmark = pytest.mark.usefixtures("no_grad", "undone")


@pytest.fixture
def recorded() -> Pair:
    """A Llama with a program that has served its last step."""
    pair = Pair(device="npu")
    pair.start()
    pair.agree(6)
    before = served()
    pair.agree()
    assert served() == before + 1, reasons()
    return pair


def llama(layers: int = 2, **sizes: Any) -> LlamaForCausalLM:
    settings = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    settings |= {"intermediate_size": 128, "num_hidden_layers": layers, "pad_token_id": 0}
    return llamas.llama(torch.bfloat16, factor=8, **settings | sizes)


def prompt(rows: int, length: int, padding: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :padding], ids[0, :padding] = 0, 0
    return {"input_ids": ids.npu(), "attention_mask": mask.npu()}


def tokens(
    model: torch.nn.Module, inputs: dict[str, torch.Tensor], new: int, **settings: Any
) -> torch.Tensor:
    arguments = {"do_sample": False, "max_new_tokens": new, "eos_token_id": None} | settings
    return model.generate(**inputs, **arguments).cpu()


def at_level(level: int, decode: Callable[[], Any], **settings: Any) -> Any:
    liteboost_adaptor.undo()
    liteboost_adaptor.apply(level=level, **settings)
    result = decode()
    liteboost_adaptor.undo()
    return result


@pytest.mark.parametrize("change", SEEN)
def test_a_change_between_two_tokens_is_seen(recorded: Pair, change: str) -> None:
    recorded.both(CHANGES[change])
    ours, theirs = recorded.step()
    assert torch.allclose(ours.logits, theirs.logits, rtol=1e-4, atol=1e-4)
    recorded.agree(6)


def test_other_memory_of_a_weight_is_seen(recorded: Pair) -> None:
    def exchange(model: torch.nn.Module) -> None:
        weight = model.model.layers[1].mlp.down_proj.weight
        weight.data = torch.ones(weight.shape, device="npu") / 64

    recorded.both(exchange)
    recorded.agree(6)


def test_another_dtype_is_seen(recorded: Pair) -> None:
    recorded.both(lambda model: model.bfloat16())
    recorded.start()
    recorded.agree(6, tolerance=2e-2)


def test_a_model_that_leaves_the_npu_goes_on(recorded: Pair) -> None:
    recorded.both(lambda model: model.cpu())
    recorded.start()
    recorded.agree(6)
    recorded.both(lambda model: model.npu())
    recorded.start()
    before = served()
    recorded.agree(6)
    assert served() > before


def test_a_cropped_and_a_copied_cache_go_on(recorded: Pair) -> None:
    others = copy.deepcopy(recorded.caches)
    kept = recorded.caches[0].layers[0].keys
    values = kept.clone()
    for cache in recorded.caches:
        cache.crop(-10)
    recorded.agree(6)
    assert torch.equal(kept, values)
    recorded.caches = others
    recorded.agree(6)


def test_reordered_rows_go_on() -> None:
    pair = Pair(device="npu")
    pair.start(rows=3)
    pair.agree(7, rows=3)
    for cache in pair.caches:
        cache.reorder_cache(torch.tensor([2, 0, 0], device="npu"))
    before = served()
    pair.agree(7, rows=3)
    assert served() > before


@pytest.mark.parametrize(
    ("rows", "padding", "settings"),
    [(1, 0, {}), (3, 0, {}), (3, 4, {}), (1, 0, {"num_beams": 3}), (1, 0, {"prompt_lookup_num_tokens": 2})],
    ids=["one row", "rows", "padded rows", "beams", "assisted"],
)
def test_generate_gives_the_tokens_of_level_one(rows: int, padding: int, settings: dict[str, Any]) -> None:
    inputs, new = prompt(rows, 9, padding), 20
    model = llama()
    expected = at_level(1, lambda: tokens(model, inputs, new, **settings))
    liteboost_adaptor.apply(level=2)
    before = served()
    assert torch.equal(tokens(model, inputs, new, **settings), expected)
    if not settings:  # beams move what is kept, and assistants hand over several tokens at once
        assert served() - before >= new - 1 - steps.RECORDED_AT - 3, reasons()


def test_a_table_of_angles_that_grows_or_is_no_longer_right_is_made_again() -> None:
    def slower(model: torch.nn.Module) -> None:
        model.model.rotary_emb.inv_freq.mul_(0.5)

    def other_memory(model: torch.nn.Module) -> None:
        model.model.rotary_emb.inv_freq.data = model.model.rotary_emb.inv_freq * 3

    def decoded(count: int) -> list[torch.Tensor]:
        model, inputs = llama(), prompt(1, 246)
        found = [tokens(model, inputs, 24)]  # beyond 256 positions
        for change in (slower, other_memory):
            change(model)
            found.append(tokens(model, inputs, 12))
        assert served() - before >= count
        return found

    before = served()
    expected = at_level(1, lambda: decoded(0))
    liteboost_adaptor.apply(level=2)
    before, looked_up = served(), report.counter("npu.generate_rotary").calls
    found = decoded(25)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert not torch.equal(found[0][:, 246:258], found[1][:, 246:])
    assert report.counter("npu.generate_rotary").calls - looked_up > 40


def test_a_step_that_waits_for_a_value_of_the_device_is_not_recorded() -> None:
    pair = Pair(device="npu")
    norm = pair.ours.model.norm
    original = type(norm).forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return original(self, x) if bool((x > -1e9).all()) else x

    forward.__module__ = original.__module__
    norm.__class__ = type("Deciding", (type(norm),), {"forward": forward, "__module__": original.__module__})
    pair.start()
    before = served()
    pair.agree(10)
    assert served() == before
    assert any("reads values" in reason or "runs a function" in reason for reason in reasons())


def test_a_step_waits_for_nothing_and_copies_nothing_to_the_host(recorded: Pair) -> None:
    ids = recorded.tokens(1, 1)
    before = served()
    with recording() as trace:
        recorded.ours(input_ids=ids, past_key_values=recorded.caches[0], use_cache=True)
    assert served() == before + 1
    assert not trace.copies("d2h") and not trace.synchronisations
