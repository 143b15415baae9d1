"""Every decode step is counted: as served by a program, or with the reason why it was not."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import tiny_models
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import liteboost_adaptor
from liteboost_adaptor.program import disguise, reasons
from liteboost_adaptor.report import report

from .conftest import Pair, served

#: Steps of a generation.
NEW_TOKENS = 12


class _Looks(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Tokenizer:
    pass


def _counted() -> int:
    counter = report.counter("step.program")
    return counter.calls + counter.fallbacks.total()


def _generate(model: torch.nn.Module, rows: int = 1, **settings: Any) -> int:
    ids = torch.randint(1, 90, (rows, 7))
    lengths = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    model.generate(ids, pad_token_id=0, **lengths, **settings)
    return NEW_TOKENS - 1


def _steps(model: torch.nn.Module, count: int = 7, look: Callable[[Any], Any] = len, **kwargs: Any) -> int:
    ids = torch.randint(1, 90, (1, 8))
    cache = model(ids, use_cache=True).past_key_values
    for _ in range(count):
        model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True, **kwargs)
        look(cache)
    return count


def _embedded(model: torch.nn.Module) -> int:
    ids = torch.randint(1, 90, (1, 8))
    cache = model(ids, use_cache=True).past_key_values
    for _ in range(3):
        model(inputs_embeds=model.get_input_embeddings()(ids[:, :1]), past_key_values=cache)
    return 3


def _under(context: Any) -> Callable[[torch.nn.Module], int]:
    def way(model: torch.nn.Module) -> int:
        with context():
            return _steps(model, 3)

    return way


def _hooked(model: torch.nn.Module) -> int:
    handle = model.model.norm.register_forward_hook(lambda module, args, made: None)
    try:
        return _steps(model)
    finally:
        handle.remove()


def _changed(model: torch.nn.Module) -> int:
    model.config.noted = torch.rand(()).item()
    return _steps(model)


def _captured(model: torch.nn.Module) -> int:
    model(torch.randint(1, 90, (1, 8)), output_hidden_states=True)
    return _steps(model)


#: Ways to call, and a reason that is counted while they do; an empty string where programs serve.
WAYS: dict[str, tuple[Callable[[torch.nn.Module], int], str]] = {
    "generation": (_generate, ""),
    "three rows": (lambda model: _generate(model, 3), ""),
    "beams": (lambda model: _generate(model, num_beams=3), ""),
    "a static cache": (lambda model: _generate(model, cache_implementation="static"), "attention_mask of 4"),
    "steps": (_steps, ""),
    "hidden states once": (_captured, ""),
    "an object": (lambda model: _steps(model, tokenizer=_Tokenizer()), ""),
    "some hidden states": (lambda model: _steps(model, output_hidden_states=[1]), "reads output_hidden"),
    "embeddings": (_embedded, "its token is given as inputs_embeds"),
    "gradients": (_under(torch.enable_grad), "gradients may be wanted"),
    "autocast": (_under(lambda: torch.autocast("cpu", torch.bfloat16)), ""),
    "a dispatch mode": (_under(_Looks), "a dispatch mode"),
    "a function mode": (_under(_Calls), "a function mode"),
    "hooks": (_hooked, reasons.HOOKED),
    "a change": (_changed, ""),
    "keys taken": (lambda model: _steps(model, look=lambda cache: cache.layers[0].keys), ""),
}


@pytest.fixture(scope="module")
def model() -> Any:
    liteboost_adaptor.undo()
    made = tiny_models.build("llama")
    liteboost_adaptor.apply(made, level=2)
    yield made
    liteboost_adaptor.undo()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_served_steps_and_reasons_are_all_decode_steps(model: torch.nn.Module, seed: int) -> None:
    """In any order: what one way of calling leaves, the next one finds."""
    names = [*WAYS, *WAYS]
    random.Random(seed).shuffle(names)
    for name in names:
        way, reason = WAYS[name]
        before, fallbacks = _counted(), report.counter("step.program").fallbacks.copy()
        steps = way(model)
        assert _counted() - before == steps, name
        new = report.counter("step.program").fallbacks - fallbacks
        assert any(each.startswith(reason) for each in new) or not reason, (name, new)


def test_a_program_is_preceded_by_the_steps_it_takes_to_record_it() -> None:
    liteboost_adaptor.undo()
    model = tiny_models.build("llama")
    liteboost_adaptor.apply(model, level=2)
    counter = report.counter("step.program")
    before, fallbacks = served(), counter.fallbacks.copy()
    _steps(model, 10)
    assert counter.fallbacks - fallbacks == {reasons.NEW: 2, reasons.WATCHED: 1, reasons.RECORDED: 1}
    assert served() - before == 6


def test_each_cache_is_new_once() -> None:
    """Texts of two tokens, as clients of a server ask for: nobody has taken anything from their caches."""
    liteboost_adaptor.undo()
    model = tiny_models.build("llama")
    liteboost_adaptor.apply(model, level=2)
    counter = report.counter("step.program")
    fallbacks = counter.fallbacks.copy()
    for _ in range(12):
        _steps(model, 1)
    new = counter.fallbacks - fallbacks
    assert new[reasons.NEW_CACHE] > 1 and set(new) == {reasons.NEW, reasons.NEW_CACHE}


def test_the_first_token_behind_a_prompt_is_served_by_the_program_of_another() -> None:
    liteboost_adaptor.undo()
    model = tiny_models.build("llama")
    plain = copy.deepcopy(model)
    liteboost_adaptor.apply(model, level=2)
    _steps(model, 10)
    ids, before = torch.randint(1, 90, (1, 8)), served()
    for length in (3, 7, 8):
        prompt, token = ids[:, :length], ids[:, :1]
        caches = [each(prompt, use_cache=True).past_key_values for each in (model, plain)]
        taken = caches[0].layers[0].keys  # what somebody has is not written to
        expected = taken.clone()
        for _ in range(3):
            ours, theirs = (
                each(input_ids=token, past_key_values=cache, use_cache=True)
                for each, cache in zip((model, plain), caches, strict=True)
            )
            torch.testing.assert_close(ours.logits, theirs.logits)
        assert torch.equal(taken, expected)
        for ours, theirs in zip(*(cache.layers for cache in caches), strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys)
    assert served() - before == 9


def test_a_step_that_cannot_wait_for_another_recording_says_so() -> None:
    pair = Pair()
    pair.start()
    pair.agree(3)
    before = report.counter("step.program").fallbacks[reasons.BUSY]
    with disguise.one_at_a_time:
        pair.agree(2)
    assert report.counter("step.program").fallbacks[reasons.BUSY] == before + 2


def test_prompts_and_long_parts_of_them_are_no_decode_steps() -> None:
    pair = Pair()
    before = _counted()
    pair.start()
    for model, cache in zip((pair.ours, pair.theirs), pair.caches, strict=True):
        model(pair.tokens(1, 17), past_key_values=cache)
    assert _counted() == before
