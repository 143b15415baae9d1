"""Steps of several new tokens of a row: one program for any number, also behind crops; what is counted."""

from __future__ import annotations

import copy
import unittest.mock
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import families, tiny_models
from transformers import StaticCache, masking_utils

import liteboost_adaptor
from liteboost_adaptor.huggingface import ragged
from liteboost_adaptor.kv_cache import buffers
from liteboost_adaptor.program import arguments, program, reasons, schedule
from liteboost_adaptor.program import step as steps
from liteboost_adaptor.report import report

from .conftest import Pair, served

#: Releases before 5 make the mask of several queries by vmap, and such steps are not recorded: see
#: `test_multi_token_releases.py`.
IS_RECORDED = not hasattr(masking_utils, "_vmap_for_bhqkv")
pytestmark = pytest.mark.skipif(not IS_RECORDED, reason="this transformers makes masks by vmap")
FAMILIES = (
    *("llama", "qwen3", "gemma3_text", "mistral", "gpt2", "phi", "gpt_neox", "gpt_oss", "gemma2"),
    *("mixtral", "qwen3_moe", "deepseek_v3", "bloom"),
)
#: Numbers of new tokens in the order in which they come.
COUNTS = (5, 3, 7, 2, 16, 4, 9, 6, 3, 8)


@pytest.fixture(autouse=True)
def _differences_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


class Parts(Pair):
    """A model and its copy that are called for several tokens at a time."""

    def part(self, count: int, rows: int = 1, **kwargs: Any) -> None:
        """The logits of ``count`` more tokens are the original's."""
        ids = self.tokens(rows, count)
        ours, theirs = (
            model(input_ids=ids, past_key_values=cache, use_cache=True, **kwargs)
            for model, cache in zip((self.ours, self.theirs), self.caches, strict=True)
        )
        torch.testing.assert_close(ours.logits, theirs.logits, atol=2e-5, rtol=2e-4)

    def parts(self, counts: tuple[int, ...], rows: int = 1, **kwargs: Any) -> int:
        """How many of these steps were served."""
        before = served()
        for count in counts:
            self.part(count, rows, **kwargs)
        return served() - before

    def crop(self, count: int) -> None:
        for cache in self.caches:
            cache.crop(-count)

    def keeps_the_same(self) -> None:
        for ours, theirs in zip(*(cache.layers for cache in self.caches), strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(ours.values, theirs.values, atol=1e-5, rtol=1e-4)

    def programs(self) -> list[Any]:
        own = vars(self.ours)["_liteboost_steps"]
        return [each for kept in own._programs.values() for each in kept]


@pytest.fixture
def recorded() -> Iterator[Parts]:
    """A Llama with one program, for several tokens."""
    pair = Parts()
    pair.start(count=21)
    pair.parts((5, 3, 5, 3))
    assert pair.parts((4,)) == 1
    yield pair
    liteboost_adaptor.undo()


@pytest.mark.parametrize("rows", [1, 3], ids=["one row", "rows"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_program_serves_any_number_of_tokens(family: str, rows: int) -> None:
    pair = Parts(family)
    pair.start(rows, 31)
    pair.parts((5, 3, 7, 3, 5, 6), rows)
    assert pair.parts(COUNTS, rows) == len(COUNTS), dict(report.counter("step.program").fallbacks)
    assert len(pair.programs()) == 1
    pair.keeps_the_same()


def test_a_program_gives_the_bits_of_the_step_it_was_recorded_from(recorded: Parts) -> None:
    ids = recorded.tokens(1, 5)
    caches = [recorded.caches[0], copy.deepcopy(recorded.caches[0])]
    found = recorded.ours(input_ids=ids, past_key_values=caches[0])
    liteboost_adaptor.undo()
    liteboost_adaptor.apply(recorded.ours, level=2, disable="step.*")
    expected = recorded.ours(input_ids=ids, past_key_values=caches[1])
    assert torch.equal(found.logits, expected.logits)
    for one, other in zip(*(cache.layers for cache in caches), strict=True):
        assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


@pytest.mark.parametrize("padding", [(0,), (0, 3, 6)], ids=["no padding", "padded rows"])
def test_masks_and_positions_grow_with_the_tokens(padding: tuple[int, ...]) -> None:
    pair, rows = Parts("qwen3"), len(padding)
    pair.start(rows, 20)
    mask = torch.ones(rows, 20, dtype=torch.long)
    for row, count in enumerate(padding):
        mask[row, :count] = 0

    def calls(counts: tuple[int, ...]) -> int:
        nonlocal mask
        before = served()
        for count in counts:
            mask = torch.cat([mask, mask.new_ones(rows, count)], 1)
            positions = (mask.cumsum(1) - 1)[:, -count:]
            pair.part(count, rows, attention_mask=mask, position_ids=positions, logits_to_keep=count)
        return served() - before

    calls((5, 3, 7, 3, 5))
    assert calls(COUNTS) == len(COUNTS), dict(report.counter("step.program").fallbacks)
    assert len(pair.programs()) == 1


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_steps_behind_a_crop_are_served_where_they_were_before(family: str) -> None:
    pair = Parts(family)
    pair.start(count=40)
    pair.parts((5, 3, 5, 3))
    memory = buffers.BUFFERS
    lies = [vars(layer)[memory]["keys"] for layer in pair.caches[0].layers]
    for count in COUNTS:
        assert pair.parts((count,)) == 1
        pair.crop(count - 1)
    assert [vars(layer)[memory]["keys"] for layer in pair.caches[0].layers] == lies
    pair.keeps_the_same()


def test_a_step_of_one_token_behind_a_crop_is_served(recorded: Parts) -> None:
    recorded.agree(6)
    recorded.crop(5)
    before = served()
    recorded.agree(3)
    recorded.part(4)
    recorded.crop(2)
    recorded.agree(2)
    assert served() - before == 6


def test_what_was_handed_out_is_not_written_over_behind_a_crop(recorded: Parts) -> None:
    kept = recorded.caches[0].layers[0].keys
    expected = kept.clone()
    seen = copy.copy(vars(recorded.caches[0].layers[1])["keys"])
    recorded.crop(4)
    recorded.parts((4, 5, 3, 4))
    assert torch.equal(kept, expected) and seen.shape[-2] > 0
    recorded.keeps_the_same()


@pytest.mark.parametrize("candidates", range(2, 9))
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_prompt_lookup_gives_the_text_of_level_0(family: str, candidates: int) -> None:
    texts = Texts(family, prompt_lookup_num_tokens=candidates)
    assert texts.served > 5, texts.reasons
    assert texts.is_accounted_for


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "gpt2", "phi", "gpt_oss"])
def test_prompt_lookup_of_other_families(family: str) -> None:
    texts = Texts(family, prompt_lookup_num_tokens=4)
    assert texts.served > 5, texts.reasons
    assert texts.is_accounted_for


def test_an_assistant_checks_several_tokens_at_a_time() -> None:
    assistant = tiny_models.build("llama", seed=5)
    texts = Texts("llama", assistant_model=assistant)
    assert texts.served > 5, texts.reasons
    assert texts.is_accounted_for


class Texts:
    """A text with candidates, of transformers and of recorded steps; they are the same.

    Attributes:
        served: Steps of several tokens, and of one, that ran as programs.
        reasons: Why others did not.
        is_accounted_for: Whether every step behind the prompt was counted once.
    """

    def __init__(self, family: str, **settings: Any) -> None:
        liteboost_adaptor.undo()
        model = tiny_models.build(family)
        ids = families.inputs_of(model, 6, (0,))["input_ids"].repeat(1, 4)
        # No token ends it: older releases look for one among candidates, and fail where it is None.
        options = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": 1 << 20, "pad_token_id": 0}
        try:
            expected = model.generate(ids, **options, **settings)
        except ValueError as fault:  # as 5.0 does behind a window
            pytest.skip(f"the original raises: {fault}")
        liteboost_adaptor.apply(model, level=2)
        counter = report.counter("step.program")
        before, fallbacks = counter.calls, counter.fallbacks.copy()
        with unittest.mock.patch.object(ragged, "is_ragged", wraps=ragged.is_ragged) as forwards:
            found = model.generate(ids, **options, **settings)
        assert torch.equal(found, expected)
        self.served, self.reasons = counter.calls - before, counter.fallbacks - fallbacks
        self.is_accounted_for = self.served + self.reasons.total() == forwards.call_count - 1


def test_quantized_weights() -> None:
    pair = Parts("llama")
    liteboost_adaptor.undo()
    liteboost_adaptor.apply(pair.ours, level=2, quant="w4a16")
    pair.theirs = copy.deepcopy(pair.ours)
    liteboost_adaptor.undo(pair.theirs)
    liteboost_adaptor.apply(pair.theirs, level=1)
    pair.start(count=20)
    pair.parts((5, 3, 7, 3, 5))
    assert pair.parts(COUNTS) == len(COUNTS), dict(report.counter("step.program").fallbacks)


def test_rows_of_integers_in_the_cache() -> None:
    pair = Parts("llama")
    liteboost_adaptor.undo()
    pair.theirs = pair.ours
    liteboost_adaptor.apply(pair.ours, level=2, quant="kv8")
    pair.start(count=20)
    pair.parts((5, 3, 7, 3, 5))
    assert pair.parts(COUNTS) == 2 * len(COUNTS), dict(report.counter("step.program").fallbacks)
    pair.crop(3)
    assert pair.parts((5,)) == 2


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_windows_are_crossed(family: str) -> None:
    pair = Parts(family)
    pair.start(count=3)
    window = pair.theirs.config.sliding_window
    pair.parts((3, 5, 2, 4) * (window // 14 + 2))
    assert pair.parts(COUNTS) == len(COUNTS), dict(report.counter("step.program").fallbacks)


def test_what_is_kept_grows_past_its_room_and_is_served_again(recorded: Parts) -> None:
    count = 2 * buffers.LEAST_SPACE // 13
    assert recorded.parts((13,) * count) >= count - 4
    recorded.keeps_the_same()


@pytest.mark.parametrize("other", ["what is kept", "the mask"])
def test_lengths_that_are_equal_by_chance_are_not_recorded(other: str) -> None:
    """One symbol would stand for both, and the program serve no step where they are not equal."""
    pair = Parts()

    def parts(*counts: int) -> int:
        kept = pair.caches[0].get_seq_length()
        masks = [torch.ones(1, kept + sum(counts[: at + 1])) for at in range(len(counts))]
        masks = [mask.long() for mask in masks]
        return sum(
            pair.parts((count,), attention_mask=mask) for count, mask in zip(counts, masks, strict=True)
        )

    pair.start(count=20)
    parts(5, 3, 7)  # the next one is recorded
    count, kept = 6, pair.caches[0].get_seq_length()
    room = vars(pair.caches[0].layers[0])[buffers.BUFFERS]["keys"].memory.size(2)
    if other == "what is kept":  # as many as come
        pair.crop(kept - count)
    else:  # is as long as there is room
        while (left := room - pair.caches[0].get_seq_length()) > arguments.MOST_TOKENS:
            pair.part(arguments.MOST_TOKENS + 1 if left > 2 * arguments.MOST_TOKENS + 1 else 1)
        count = left
    before = report.counter("step.program").fallbacks[reasons.COINCIDES]
    parts(count)
    assert report.counter("step.program").fallbacks[reasons.COINCIDES] == before + 1
    pair.crop(count)
    parts(3)
    assert parts(5, 3, 2, 3) == 4
    assert sum(each.runs == 4 for each in pair.programs()) == 1


def test_as_many_tokens_as_heads_layers_or_rows() -> None:
    config = tiny_models.build("llama").config
    for count in sorted({config.num_attention_heads, config.num_key_value_heads, config.head_dim, 2, 3}):
        if not 2 <= count <= arguments.MOST_TOKENS:
            continue
        pair = Parts()
        pair.start(count, 31)
        pair.parts((count,) * 5, count)
        assert pair.parts((count, 7, 3, 11), count) == 4, (count, report.counter("step.program").fallbacks)


def test_prompts_and_long_parts_are_no_steps(recorded: Parts) -> None:
    counter = report.counter("step.program")
    before = counter.calls + counter.fallbacks.total()
    recorded.part(arguments.MOST_TOKENS + 1)
    recorded.start(count=7)
    assert counter.calls + counter.fallbacks.total() == before
    recorded.part(arguments.MOST_TOKENS)
    assert counter.calls + counter.fallbacks.total() == before + 1


def test_embeddings_gradients_and_a_static_cache_are_counted_with_a_reason(recorded: Parts) -> None:
    counter, model, cache = report.counter("step.program"), recorded.ours, recorded.caches[0]
    ids = recorded.tokens(1, 3)

    def reasons_of(**kwargs: Any) -> list[str]:
        before = counter.fallbacks.copy()
        model(use_cache=True, **kwargs)
        return list((counter.fallbacks - before).elements())

    (reason,) = reasons_of(inputs_embeds=model.get_input_embeddings()(ids), past_key_values=cache)
    assert reason.startswith("its token is given as")
    with torch.enable_grad():
        (reason,) = reasons_of(input_ids=ids, past_key_values=cache)
    assert reason.startswith("gradients may be wanted")
    static = StaticCache(config=model.config, max_cache_len=60)
    assert not reasons_of(input_ids=ids, past_key_values=static)
    (reason,) = reasons_of(input_ids=ids, past_key_values=static)
    assert reason == reasons.NEW


def test_a_static_cache_is_served() -> None:
    pair = Parts()
    pair.caches = [StaticCache(config=pair.theirs.config, max_cache_len=100) for _ in range(2)]
    pair.part(9)
    pair.parts((5, 3, 7, 3, 5))
    assert pair.parts(COUNTS) >= len(COUNTS) - 2, dict(report.counter("step.program").fallbacks)


def test_one_token_and_several_have_programs_of_their_own(recorded: Parts) -> None:
    recorded.agree(5)
    before = served()
    for count in (3, 1, 2, 1, 1, 8, 1):
        recorded.part(count)
    assert served() - before == 7
    assert len(recorded.programs()) == 2


def test_a_bit_of_a_row_that_is_kept_drops_the_program(
    warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Parts()
    pair.start(count=21)
    pair.parts((5, 3, 5, 3))
    run = program.Program.run

    def spoiled(self: Any, *args: Any) -> Any:
        found = run(self, *args)
        _, buffer, count = found.appended[-1]
        assert count == 4
        buffer.memory.narrow(buffer.dim, buffer.end + count - 1, 1).view(torch.int32).bitwise_xor_(1)
        return found

    monkeypatch.setattr(program.Program, "run", spoiled)
    pair.part(4)
    assert len(warned) == 1 and warned[0].startswith("RuntimeWarning: ")
    assert "gave another values of the cache" in warned[0]
    assert not pair.programs()
    pair.keeps_the_same()


def test_how_many_steps_are_to_come_follows_from_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[int, list[int]] = {}
    original = schedule.steps_to_come

    def noting(count: int = 1) -> int:
        found = original(count)
        told.setdefault(count, []).append(found)
        return found

    monkeypatch.setattr(schedule, "steps_to_come", noting)
    monkeypatch.setattr(steps, "RECORDED_AT", 100)
    Texts("llama", prompt_lookup_num_tokens=4)
    assert set(told.pop(1, [0])) == {0}
    assert told and all(0 < each <= 2 * 60 // (count + 1) for count, all_ in told.items() for each in all_)
    assert all(sorted(each, reverse=True) == each for each in told.values())
