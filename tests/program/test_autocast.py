"""Steps under autocast are programs of their own, with the casts of weights that torch keeps in a block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import numbers

import liteboost_adaptor
from program.conftest import Pair, reasons, served

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    yield
    liteboost_adaptor.undo()


def autocast(dtype: torch.dtype = BF16, **settings: Any) -> Any:
    return torch.autocast("cpu", dtype, **settings)


def weight_of(model: torch.nn.Module) -> torch.nn.Parameter:
    return model.model.layers[1].mlp.down_proj.weight


def decode(pair: Pair, steps: int = 7) -> int:
    """Steps of both models under the autocast that is on, and how many of ours programs made."""
    pair.start()
    before = served()
    pair.agree(steps, tolerance=4e-2)
    return served() - before


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "olmo2", "phi", "qwen3"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_programs_serve_steps_under_autocast(family: str, dtype: torch.dtype) -> None:
    pair = Pair(family)
    with autocast(dtype):
        assert decode(pair, 9) >= 4, reasons()
        ours, theirs = pair.step()
    assert ours.logits.dtype == theirs.logits.dtype == dtype


def test_a_model_in_the_dtype_of_autocast_is_served() -> None:
    pair = Pair()
    pair.both(lambda model: model.to(BF16))
    with autocast():
        assert decode(pair) >= 3, reasons()


def test_a_program_serves_its_own_dtype_alone() -> None:
    pair = Pair()
    found = []
    for _ in range(2):
        for context in (autocast(), autocast(enabled=False), autocast(FP16)):
            with context:
                pair.start()
                for _ in range(6):
                    ours, theirs = pair.step()
                    error = numbers.relative(ours.logits.float(), theirs.logits.float())
                    found.append((torch.is_autocast_enabled("cpu"), ours.logits.dtype, error))
    assert {kind[:2] for kind in found} == {(True, BF16), (True, FP16), (False, torch.float32)}
    assert all(error <= (4e-2 if is_on else 2e-5) for is_on, _, error in found)
    before = served()
    with autocast():
        decode(pair, 4)
    assert served() - before >= 3, reasons()


def test_weights_that_change_between_two_blocks_are_seen() -> None:
    """Whatever writes to them, `.data` too, which no count of versions notices."""
    pair = Pair()
    for change in (
        lambda weight: weight.mul_(-1.5),
        lambda weight: weight.data.mul_(0.5),
        lambda weight: setattr(weight, "data", weight.data * 2),
    ):
        with autocast():
            assert decode(pair) >= 3, reasons()
        pair.both(lambda model, change=change: change(weight_of(model)))
    with autocast():
        decode(pair)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_weight_that_changes_within_a_block_keeps_its_cast(family: str) -> None:
    """As torch has it: what a run multiplies by is what the original would."""
    pair = Pair(family)
    with autocast():
        assert decode(pair) >= 3, reasons()
        pair.both(lambda model: [each.mul_(-2.0) for name, each in model.named_parameters() if "mlp" in name])
        before = served()
        pair.agree(4, tolerance=4e-2)
    assert served() - before >= 3, reasons()


def test_no_cast_outlives_its_block() -> None:
    pair = Pair()
    weight = weight_of(pair.ours)

    def kept() -> torch.Tensor:
        return torch.ops.liteboost._autocast_weight(weight, BF16)

    with autocast():
        assert decode(pair) >= 3
        in_use = kept()
        assert kept().data_ptr() == in_use.data_ptr(), "one for all who multiply by it"
    with autocast():
        assert kept().data_ptr() != in_use.data_ptr()


@pytest.mark.parametrize("settings", [{"cache_enabled": False}, {}], ids=["no cache", "frozen"])
def test_casts_that_torch_does_not_keep(settings: dict[str, Any]) -> None:
    pair = Pair()
    if not settings:
        pair.both(lambda model: model.requires_grad_(False))
    with autocast(**settings):
        assert decode(pair) >= 3, reasons()
        pair.both(lambda model: weight_of(model).data.mul_(-1.5))
        decode(pair)


def test_a_block_each_step() -> None:
    """As where a loop of one's own opens one around each call."""
    pair = Pair()
    with autocast():
        pair.start()
    before = served()
    for _ in range(8):
        with autocast():
            pair.agree(1, tolerance=4e-2)
    assert served() - before >= 4, reasons()


def test_regions_without_autocast_and_casts_by_hand() -> None:
    """A product that the model keeps out of autocast, and a cast of its own that it writes to."""
    pair = Pair()

    def extend(model: torch.nn.Module) -> None:
        torch.manual_seed(3)
        head = model.lm_head
        model.lm_head = _Own(head.in_features, head.out_features, bias=False)
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(head.weight))

    pair.both(extend)
    with autocast():
        pair.start()
        before = served()
        for _ in range(9):
            ours, theirs = pair.step()
            assert ours.logits.dtype == theirs.logits.dtype == torch.float32
            assert numbers.relative(ours.logits, theirs.logits) <= 4e-2
    assert served() - before >= 4, reasons()


class _Own(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled = self.weight.to(torch.bfloat16)
        doubled.mul_(2.0)
        with torch.autocast("cpu", enabled=False):
            exact = torch.nn.functional.linear(x.float(), self.weight)
        return exact + torch.nn.functional.linear(x, doubled)


class _Block(torch.nn.Module):
    """A part of a model that computes under autocast, whatever is on around it."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            made = self.inner(x)
        return made.float()


def test_a_block_that_the_model_opens_leaves_no_cast() -> None:
    """Its end empties the cache, which no run of a program does. One after the other: it is torch's."""
    pair = Pair()
    tokens = [pair.tokens(1, 9), *(pair.tokens(1, 1) for _ in range(16))]
    found = []
    for model in (pair.ours, pair.theirs):
        second = model.model.layers[1]
        second.mlp = _Block(second.mlp)
        weight, cache = second.mlp.inner.down_proj.weight, None
        for step, ids in enumerate(tokens):
            if step == 9:
                weight.data.mul_(-1.5)
            result = model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            found.append(result.logits[:, -1])
        with torch.enable_grad(), autocast():
            assert torch.nn.functional.linear(torch.ones(1, weight.shape[1]), weight).requires_grad
    assert served() > 0
    for ours, theirs in zip(found[:17], found[17:], strict=True):
        assert numbers.relative(ours, theirs) <= 2e-2


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_casts_of_a_step_have_gradients(family: str) -> None:
    """A token and then a loss in one block, whose casts the step has made that is recorded, or a run."""
    pair = Pair(family)
    ids = pair.tokens(1, 9)
    with autocast():
        pair.start()
    before = served()
    for _ in range(7):
        # Before torch 2.11 a cast that is made without gradients gives none to whoever takes it out later.
        ours, theirs = (
            with_gradients(model, cache, ids)
            for model, cache in zip((pair.ours, pair.theirs), pair.caches, strict=True)
        )
        assert ours == theirs and ours
    assert served() - before >= 3, reasons()


def with_gradients(model: Any, cache: Any, ids: torch.Tensor) -> set[str]:
    """The parameters that a loss has gradients for, behind a token in the same block."""
    with autocast():
        model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
        with torch.enable_grad():
            model.zero_grad()
            model(ids).logits.float().sum().backward()
    return {name for name, each in model.named_parameters() if each.grad is not None}


def test_autocast_without_a_block_takes_the_original() -> None:
    """Nobody knows when its cache is emptied: blocks that the model opens do it, but not in a program."""
    pair = Pair()
    torch.set_autocast_enabled("cpu", True)
    try:
        assert decode(pair) == 0
    finally:
        torch.set_autocast_enabled("cpu", False)
        torch.clear_autocast_cache()
    assert reasons()["under autocast"] >= 7


def test_autocast_of_another_device_takes_the_original() -> None:
    pair = Pair()
    torch.set_autocast_enabled("cuda", True)
    try:
        with autocast():
            assert decode(pair) == 0
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert reasons()["under autocast"] >= 7


def test_exported_folders_are_recorded_without() -> None:
    from liteboost_adaptor.errors import ExportError
    from liteboost_adaptor.export.recording import record

    with autocast(), pytest.raises(ExportError, match="autocast"):
        record(Pair().ours, 4, 1)
