"""A model that is dropped is gone, whatever was recorded of it; what it is and has is compared as before."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import tiny_models
from transformers import GenerationConfig

import liteboost_adaptor
from liteboost_adaptor.huggingface.steps import served_by
from liteboost_adaptor.program.owner import STEPS, Owner

from .conftest import Pair, served


@pytest.fixture
def uncollected() -> Iterator[None]:
    """What nobody holds is freed at once, or not at all."""
    gc.disable()
    yield
    gc.enable()


def texts(model: Any, rows: int = 1, **options: Any) -> None:
    ids = torch.randint(3, 90, (rows, 7))
    model.generate(ids, max_new_tokens=80, min_new_tokens=80, pad_token_id=0, do_sample=False, **options)


def batches(model: Any) -> None:
    settings = GenerationConfig(max_new_tokens=70, do_sample=False, pad_token_id=0, eos_token_id=-1)
    model.generate_batch([[5, 6, 7], [8, 9], [10, 11, 12]], generation_config=settings, progress_bar=False)


USES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "generate": ("llama", texts),
    "rows": ("qwen3", lambda model: texts(model, rows=3)),
    "candidates": ("llama", lambda model: texts(model, prompt_lookup_num_tokens=3)),
    "window": ("gemma3_text", texts),
    "state": ("qwen3_next", texts),
    "experts": ("mixtral", texts),
    "batches": ("llama", batches),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.usefixtures("uncollected")
def test_a_model_that_is_dropped_is_gone(use: str) -> None:
    family, call = USES[use]
    liteboost_adaptor.undo()
    model = tiny_models.build(family)
    liteboost_adaptor.apply(model, level=2)
    gc.collect()
    before = served()
    call(model)
    assert served() > before
    held = [weakref.ref(model), *map(weakref.ref, model.parameters())]
    del model
    assert not any(each() is not None for each in held)


def exchange_dict(model: Any) -> None:
    object.__setattr__(model, "__dict__", dict(vars(model)))


def exchange_class(model: Any) -> None:
    model.__class__ = type("Named", (type(model),), {})


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "forward", model.forward),
        lambda model: setattr(model, "found_later", [1]),
        lambda model: setattr(model, "config", copy.deepcopy(model.config)),
        lambda model: delattr(model, "marked"),
        lambda model: setattr(model, "marked", 2),
        exchange_dict,
        exchange_class,
    ],
    ids=["forward", "new", "exchanged", "deleted", "another value", "dict", "class"],
)
def test_what_is_done_to_the_model_itself_is_seen(change: Callable[[Any], None]) -> None:
    pair = Pair()
    pair.ours.marked = 1
    pair.start()
    pair.agree(7)
    model, before = pair.ours, served()
    (programs,) = vars(model)[STEPS]._programs.values()
    state = programs[0].state
    assert state.is_as_it_was() and not list(state.changes())
    change(model)
    assert not state.is_as_it_was() and list(state.changes())
    pair.step()
    assert served() == before
    liteboost_adaptor.undo()


def test_a_model_gets_its_attributes_back_and_keeps_its_steps() -> None:
    model = torch.nn.Linear(2, 2)
    model.kept, weight = [1], model.weight
    owner = Owner(model)
    vars(model)[STEPS] = steps = object()
    model.kept, model.new = [2], 3
    owner.give_back()
    assert model.kept == [1] and not hasattr(model, "new") and model.weight is weight
    assert vars(model)[STEPS] is steps and not list(owner.changes(lambda one, other: one is other))


def test_of_a_model_that_is_gone_nothing_is_there() -> None:
    owner = Owner(torch.nn.Linear(2, 2))
    assert not owner.is_there() and list(owner.changes(lambda one, other: one is other))
    owner.give_back()


def test_programs_outlive_other_steps_of_the_model() -> None:
    pair = Pair()
    pair.start()
    pair.agree(7)
    vars(pair.ours)["_liteboost_last"] = None
    pair.agree(70)
    names, before = list(vars(pair.ours)), served()
    with served_by(pair.ours, None):
        assert vars(pair.ours)[STEPS] is None
    assert list(vars(pair.ours)) == names and names[-1] != STEPS
    (programs,) = vars(pair.ours)[STEPS]._programs.values()
    assert programs[0].state._owner.is_there()
    pair.agree()
    assert served() == before + 1
    liteboost_adaptor.undo()
    with served_by(pair.ours, None):
        pass
    assert STEPS not in vars(pair.ours)
