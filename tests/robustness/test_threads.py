"""Threads that generate while other threads apply and undo the very models they use."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
import torch
from support import calls, numbers, tiny_models

import liteboost_adaptor
from liteboost_adaptor.huggingface.runtime import runtime

TOLERANCE = 2e-5
FAMILIES = ("llama", "gemma2", "qwen3", "mixtral")
ROUNDS = 12


class Work:
    """One model, and what it computes when nothing serves it."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.model = tiny_models.build(family)
        self.inputs = numbers.padded_inputs(self.model)
        self.expected = numbers.greedy(self.model, self.inputs, steps=4)

    def check(self) -> None:
        """Generate; every logit must be the unpatched model's up to rounding, and every certain token."""
        found = numbers.greedy(self.model, self.inputs, steps=4)
        certain = numbers.certain(self.expected, TOLERANCE * self.expected.logits.abs().max().item())
        assert torch.equal(found.tokens[certain], self.expected.tokens[certain]), self.family
        # The logits of a step follow from the tokens before it.
        same_prefix = torch.cat([torch.ones_like(certain[:, :1]), certain[:, :-1]], dim=1)
        error = numbers.relative(found.logits[same_prefix], self.expected.logits[same_prefix])
        assert error <= TOLERANCE, f"{self.family}: {error}"


def together(*actions: Callable[[], None]) -> None:
    """Run each action in a thread of its own, begun at one moment; raise what any of them raised."""
    faults: list[BaseException] = []
    barrier = threading.Barrier(len(actions))

    def guarded(action: Callable[[], None]) -> None:
        try:
            barrier.wait(timeout=60)
            action()
        except BaseException as fault:  # noqa: BLE001 - handed to the test's own thread
            faults.append(fault)

    threads = [threading.Thread(target=guarded, args=(action,), daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if faults:
        raise faults[0]


def generating(work: Work, finished: threading.Event) -> Callable[[], None]:
    def generate() -> None:
        try:
            for _ in range(ROUNDS):
                work.check()
        finally:
            finished.set()

    return generate


def patched_for_a_while(model: torch.nn.Module) -> None:
    with liteboost_adaptor.patched(model):
        liteboost_adaptor.status()


#: What is done to a model, or to all, while it may be in use.
CHANGES: list[Callable[[torch.nn.Module], object]] = [
    lambda model: liteboost_adaptor.apply(model, level=1),
    lambda model: liteboost_adaptor.apply(model, level=2),
    liteboost_adaptor.undo,
    patched_for_a_while,
    lambda model: liteboost_adaptor.apply(),
    lambda model: liteboost_adaptor.undo(),
    lambda model: liteboost_adaptor.status().to_json(),
]


def changing(works: list[Work], finished: list[threading.Event], seed: int) -> Callable[[], None]:
    """Makes changes in an order that the seed decides, until everybody has finished."""
    order = random.Random(seed)

    def change() -> None:
        while not all(event.is_set() for event in finished):
            order.choice(CHANGES)(order.choice(works).model)
            time.sleep(order.choice([0, 0.001, 0.02]))

    return change


def test_generation_while_others_apply_and_undo() -> None:
    works = [Work(family) for family in FAMILIES]
    finished = [threading.Event() for _ in works]
    with calls.served() as served:
        together(
            *map(generating, works, finished), changing(works, finished, 1), changing(works, finished, 2)
        )
    # Both ways were taken: what never ran patched proves nothing.
    assert served.kinds["norm"] > 0
    liteboost_adaptor.undo()
    for work in works:
        work.check()


def test_one_model_shared_by_all_threads() -> None:
    works = [Work("llama")] * 3
    finished = [threading.Event() for _ in works]
    together(*map(generating, works, finished), changing(works, finished, 3))


@pytest.mark.parametrize("level", [1, 2])
def test_threads_that_apply_the_same_model_at_once(level: int) -> None:
    work = Work("llama")
    together(*(lambda: liteboost_adaptor.apply(work.model, level=level) and None for _ in range(6)))
    assert len(liteboost_adaptor.status().models) == 1
    with calls.served() as served:
        work.check()
    assert served.kinds["norm"] and served.kinds["attention"]
    together(*(lambda: liteboost_adaptor.undo(work.model) and None for _ in range(6)))
    with calls.served() as served:
        work.check()
    assert not served.kinds


def test_a_model_and_a_part_of_it_bound_inside_patched() -> None:
    work = Work("llama")
    with liteboost_adaptor.patched(work.model):
        # As it happens where another thread uses the inner model between two bindings of the whole.
        liteboost_adaptor.apply(work.model.model)
    assert liteboost_adaptor.status().models == []
    work.check()


def test_a_model_that_two_threads_use_first_is_bound_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.build("llama")
    inputs = tiny_models.example_inputs(model)
    bound, rebind = [], runtime._rebind

    def slowly(*args: object) -> object:
        bound.append(args)
        time.sleep(0.3)  # the other thread asks meanwhile whether the model is bound
        return rebind(*args)

    def use() -> None:
        with torch.no_grad():
            model(**inputs)

    monkeypatch.setattr(runtime, "_rebind", slowly)
    liteboost_adaptor.apply()
    together(use, use)
    assert len(bound) == 1
