"""Steps of one token run as programs, and nobody can tell but by the clock."""

from __future__ import annotations

import collections
import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from support import families, families_images, tiny_models
from transformers import AttentionInterface, DynamicCache, StaticCache

import liteboost_adaptor
from liteboost_adaptor.kv_cache import buffers
from liteboost_adaptor.program import step as steps

from .conftest import Pair, reasons, served

FAMILIES = (
    *("llama", "qwen3", "gemma3_text", "gpt_oss", "mixtral"),
    *("deepseek_v3", "gpt2", "mamba", "qwen3_next"),
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padding", [(0,), (0, 3, 6)], ids=["one row", "padded rows"])
def test_generate_gives_the_logits_and_tokens_of_transformers(family: str, padding: tuple[int, ...]) -> None:
    liteboost_adaptor.undo()
    model = tiny_models.build(family)
    inputs = families.inputs_of(model, 12, padding)
    tokens, logits = families.decode(model, inputs, 14)
    liteboost_adaptor.apply(model, level=2)
    before = served()
    _, found = families.decode(model, inputs, 14, forced=tokens)
    assert (found - logits).norm() <= 2e-5 * logits.norm()
    assert served() - before >= 14 - 1 - steps.RECORDED_AT - 1


def test_a_program_gives_what_the_step_it_was_recorded_from_gives_bit_for_bit() -> None:
    liteboost_adaptor.undo()
    model = tiny_models.build("qwen3").bfloat16()
    inputs = families.inputs_of(model, 12, (0, 3, 6))
    liteboost_adaptor.apply(model, level=2, disable="step.*")
    before = served()
    tokens, logits = families.decode(model, inputs, 40)
    assert served() == before
    liteboost_adaptor.apply(model, level=2)
    found, found_logits = families.decode(model, inputs, 40)
    assert served() - before >= 30
    assert torch.equal(tokens, found) and torch.equal(logits, found_logits)


def test_positional_arguments_and_slices_of_tokens_are_served() -> None:
    pair = Pair()
    pair.start()
    ids = pair.tokens(1, 20)
    before = served()
    for at in range(20):
        ours = pair.ours(ids[:, at : at + 1], None, None, pair.caches[0])
        theirs = pair.theirs(ids[:, at : at + 1], past_key_values=pair.caches[1])
        assert torch.allclose(ours.logits, theirs.logits, atol=1e-5)
    assert served() - before >= 19 - steps.RECORDED_AT


def test_a_cache_that_is_called_cache_is_served() -> None:
    """As transformers calls it from 5.24 on."""
    pair = Pair()
    cls = type(pair.theirs)

    class Renamed(cls):  # type: ignore[misc, valid-type]
        def forward(self, input_ids: Any = None, cache: Any = None, **kwargs: Any) -> Any:
            return super().forward(input_ids, past_key_values=cache, **kwargs)

    pair.start()
    liteboost_adaptor.undo()
    pair.ours.__class__ = Renamed
    liteboost_adaptor.apply(pair.ours, level=2)
    before = served()
    for _ in range(20):
        ids = pair.tokens(1, 1)
        ours = pair.ours(ids, cache=pair.caches[0])
        theirs = pair.theirs(ids, past_key_values=pair.caches[1])
        assert torch.allclose(ours.logits, theirs.logits, atol=1e-5)
    assert served() - before >= 20 - steps.RECORDED_AT - 1


def test_what_is_kept_grows_past_its_room_and_is_served_again() -> None:
    pair = Pair()
    pair.start(count=5)
    before = served()
    pair.agree(2 * buffers.LEAST_SPACE)
    assert served() - before >= 2 * buffers.LEAST_SPACE - 12
    assert pair.caches[0].get_seq_length() == pair.caches[1].get_seq_length() == 5 + 2 * buffers.LEAST_SPACE
    for ours, theirs in zip(pair.caches[0].layers, pair.caches[1].layers, strict=True):
        assert torch.allclose(ours.keys, theirs.keys, atol=1e-5)
        assert torch.allclose(ours.values, theirs.values, atol=1e-5)


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "mistral"])
def test_windows_are_crossed(family: str) -> None:
    pair = Pair(family)
    pair.start(count=3)
    window = getattr(pair.theirs.config, "sliding_window", 8)
    before = served()
    pair.agree(window + 12)
    assert served() > before + 8


def test_a_cropped_cache_goes_on(recorded: Pair) -> None:
    for cache in recorded.caches:
        cache.crop(-10)
    recorded.agree(8)
    assert recorded.caches[0].get_seq_length() == 14


def test_what_was_handed_out_is_not_written_over(recorded: Pair) -> None:
    kept = recorded.caches[0].layers[0].keys
    values = kept.clone()
    for cache in recorded.caches:
        cache.crop(-10)
    recorded.agree(8)
    assert torch.equal(kept, values)


def test_a_copied_cache_goes_its_own_way(recorded: Pair) -> None:
    others = copy.deepcopy(recorded.caches)
    recorded.agree(3)
    mine, recorded.caches = recorded.caches, others
    recorded.agree(3)
    recorded.caches = mine
    recorded.agree(3)


def test_two_caches_take_turns(recorded: Pair) -> None:
    first = recorded.caches
    recorded.start(count=17)
    second, before = recorded.caches, served()
    for _ in range(8):
        recorded.caches = first
        recorded.agree()
        recorded.caches = second
        recorded.agree()
    assert served() - before >= 12


def test_reordered_rows_go_on() -> None:
    pair = Pair()
    pair.start(rows=3)
    pair.agree(7, rows=3)
    for cache in pair.caches:
        cache.reorder_cache(torch.tensor([2, 0, 0]))
    before = served()
    pair.agree(7, rows=3)
    assert served() > before


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3},
        {"do_sample": True, "top_k": 5},
        {"repetition_penalty": 1.3},
        {"prompt_lookup_num_tokens": 2},
        {"use_cache": False},
    ],
    ids=str,
)
def test_ways_of_generating(settings: dict[str, Any]) -> None:
    pair = Pair()
    ids = pair.tokens(1, 7)
    found = []
    for model in (pair.ours, pair.theirs):
        torch.manual_seed(3)
        found.append(model.generate(ids, max_new_tokens=24, min_new_tokens=24, pad_token_id=0, **settings))
    assert torch.equal(*found)


def test_a_static_cache_is_served() -> None:
    pair = Pair()
    ids = pair.tokens(1, 7)
    pair.caches = [StaticCache(config=pair.theirs.config, max_cache_len=40) for _ in range(2)]
    for model, cache in zip((pair.ours, pair.theirs), pair.caches, strict=True):
        model(ids, past_key_values=cache)
    before = served()
    pair.agree(10)
    assert served() > before


def test_inference_mode_and_no_grad_share_programs() -> None:
    pair = Pair()
    with torch.inference_mode():
        pair.start()
        pair.agree(7)
        before = served()
        pair.agree(3)
    pair.start()
    pair.agree(6)
    with torch.inference_mode():
        pair.agree(3)
    pair.agree(3)
    assert served() - before >= 3 + 4 + 6


def test_a_model_that_holds_other_kinds_of_tensors_takes_the_original() -> None:
    class Noted(torch.Tensor):
        pass

    pair = Pair()
    for model in (pair.ours, pair.theirs):
        norm = model.model.norm
        norm.weight = torch.nn.Parameter(norm.weight.detach().as_subclass(Noted))
    pair.start()
    before = served()
    pair.agree(8)
    assert served() == before


def test_attentions_and_hidden_states_are_those_of_the_step() -> None:
    pair = Pair()
    pair.start()
    for _ in range(8):
        ours, theirs = pair.step(output_hidden_states=True)
        for found, expected in zip(ours.hidden_states, theirs.hidden_states, strict=True):
            assert type(found) is torch.Tensor and torch.allclose(found, expected, atol=1e-5)


def test_a_step_that_reads_values_takes_the_original_and_says_so() -> None:
    pair = Pair()

    def reading(module: torch.nn.Module) -> None:
        inner = module.model.layers[0].mlp

        class Reading(type(inner)):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) * (1 if x.abs().max().item() > 0 else 0)

        inner.__class__ = Reading

    pair.both(reading)
    pair.start()
    before = served()
    pair.agree(12)
    assert served() == before
    assert any(reason.startswith("reads values") for reason in reasons())


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_step_that_fails_while_it_is_recorded_is_made_again(family: str) -> None:
    """A module that wants a number where a recorded step has a symbol, behind layers that have appended."""
    pair = Pair(family)

    def wants_numbers(module: torch.nn.Module) -> None:
        norm = module.model.norm

        class Strict(type(norm)):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if not hasattr(vars(self.cache[0].layers[-1])["keys"].shape[-2], "real"):
                    raise TypeError("no number")
                return super().forward(x)

        norm.__class__ = Strict
        norm.cache = []

    pair.both(wants_numbers)
    for model in (pair.ours, pair.theirs):
        model.model.norm.cache.append(DynamicCache(config=model.config))
    ids = pair.tokens(1, 9)
    pair.caches = [model.model.norm.cache[0] for model in (pair.ours, pair.theirs)]
    for model, cache in zip((pair.ours, pair.theirs), pair.caches, strict=True):
        model(ids, past_key_values=cache)
    pair.agree(12)
    assert any("no number" in reason for reason in reasons())
    assert pair.caches[0].get_seq_length() == 9 + 12


def counting(module: torch.nn.Module) -> None:
    """Have an MLP of ``module`` count its calls, which no program does."""
    inner = module.model.layers[0].mlp
    inner.calls = 0

    class Counting(type(inner)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    inner.__class__ = Counting


def test_a_step_that_changes_the_model_takes_the_original() -> None:
    pair = Pair()
    pair.both(counting)
    pair.start()
    pair.agree(12)
    assert pair.ours.model.layers[0].mlp.calls == pair.theirs.model.layers[0].mlp.calls == 13


def test_what_runs_for_the_first_time_in_a_step_that_is_recorded_runs_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it changes could not be taken back, were the step made again: nobody has read it."""
    pair, former = Pair(), AttentionInterface._global_mapping["sdpa"]
    seen: collections.Counter[Any] = collections.Counter()

    def noting(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen[id(module.config)] += 1
        return former(module, *args, **kwargs)

    pair.both(counting)
    pair.start()
    pair.agree(3)
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", noting)
    pair.agree(1)
    assert seen[id(pair.ours.config)] == seen[id(pair.theirs.config)] == pair.ours.config.num_hidden_layers


def test_a_decision_that_is_another_one_at_most_steps_is_left_to_the_original() -> None:
    """Each program would run up to its decision in vain; and a profiler would see all of them."""
    pair = Pair()

    def deciding(module: torch.nn.Module) -> None:
        inner = module.model.norm

        class Deciding(type(inner)):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = super().forward(x)
                for at in range(6):
                    x = x * 1.1 if x[0, 0, at] > 0 else x
                return x

        inner.__class__ = Deciding

    pair.both(deciding)
    pair.start()
    pair.agree(6)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        pair.agree(1)
    counts = {each.key: each.count for each in profiler.key_averages()}
    assert counts["aten::embedding"] == 2  # one of ours, one of theirs
    pair.agree(120)
    (own,) = (each for each in steps._all if each.model() is pair.ours)
    programs = [each for kept in own._programs.values() for each in kept]
    assert sum(each.stops for each in programs) > 40
    assert all(each.stops <= each.runs + 9 for each in programs)


def test_a_decision_by_a_mask_is_made_again() -> None:
    """All ones, then a row that is padded: transformers drops the mask in the first case."""
    pair = Pair()
    pair.start(rows=2, count=6)
    mask = torch.ones(2, 6, dtype=torch.long)
    for at in range(24):
        mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
        given = mask.clone()
        if at % 8 > 3:
            given[1, :3] = 0
        pair.agree(rows=2, attention_mask=given)
    assert served()


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_programs_stay_after_an_image(family: str) -> None:
    """For its features, transformers collects hidden states of the vision tower, by hooks that stay."""
    liteboost_adaptor.undo()
    model = tiny_models.build(family)
    with_image = families_images.image_inputs(model, rows=1)
    without = {"input_ids": torch.randint(1, 50, (1, 6), generator=torch.Generator().manual_seed(0))}
    lengths = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    order = (without, with_image, without, with_image)
    expected = [model.generate(**inputs, **lengths) for inputs in order]
    liteboost_adaptor.apply(model, level=2)
    for inputs, tokens in zip(order, expected, strict=True):
        before = served()
        assert torch.equal(model.generate(**inputs, **lengths), tokens)
        assert served() - before >= 12, reasons()


def test_two_threads_with_one_model() -> None:
    pair = Pair()
    prompts = [pair.tokens(1, count) for count in (5, 11)]
    settings: dict[str, Any] = {"max_new_tokens": 40, "min_new_tokens": 40, "pad_token_id": 0}
    expected = [pair.theirs.generate(ids, **settings) for ids in prompts]
    found: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def run(at: int) -> None:
        for _ in range(4):
            found[at].append(pair.ours.generate(prompts[at], **settings))

    threads = [threading.Thread(target=run, args=(at,)) for at in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for at in (0, 1):
        assert len(found[at]) == 4 and all(torch.equal(each, expected[at]) for each in found[at])


def test_programs_go_with_the_model(recorded: Pair) -> None:
    weight = weakref.ref(recorded.ours.model.layers[0].mlp.down_proj.weight)
    recorded.ours = None
    recorded.caches = []
    gc.collect()
    assert weight() is None


def test_copies_and_pickles_hold_no_program(recorded: Pair) -> None:
    other = copy.deepcopy(recorded.ours)
    ids = recorded.tokens(1, 5)
    assert torch.allclose(other(ids).logits, recorded.theirs(ids).logits, atol=1e-5)
    before = served()
    cache = DynamicCache()
    other(ids, past_key_values=cache)
    other(ids[:, :1], past_key_values=cache)
    assert served() == before
