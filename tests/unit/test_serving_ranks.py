"""What rank 0 of ``transformers serve`` tells the others, and which servers it does not start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from liteboost_adaptor.errors import ParallelError
from liteboost_adaptor.parallel import serving
from liteboost_adaptor.parallel.tensor.plan import unsharded_plan
from liteboost_adaptor.quantization.identifiers import PLAN


class Store:
    """The store that ranks share, in one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes | None:
        return self._values.get(key)


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimpleNamespace(heartbeat=SimpleNamespace(rank=0, size=2, store=Store()))
    monkeypatch.setattr(serving.groups, "world", lambda: world)


def models(world_size: int = 2) -> Any:
    plan = unsharded_plan("Model")
    vars(plan)["world_size"] = world_size
    loaded = SimpleNamespace(model=SimpleNamespace(**{PLAN: plan}))
    return SimpleNamespace(force_model="a", loaded_models={"a@main": loaded}, shutdown=lambda: None)


class Manager:
    """Stands for ``CBGenerateManager``."""

    _cb: Any = None

    def init_cb(self, model: Any, settings: Any) -> None:
        self._cb = settings


class State:
    """Stands for ``GenerationState``."""

    _continuous_batching = True

    def __init__(self) -> None:
        self.manager, self.ended = Manager(), False

    def get_manager(self, name: str, use_cb: bool = False) -> Manager:
        return self.manager

    def use_continuous_batching(self, model: Any, modality: str) -> bool:
        return modality == "LLM"

    def shutdown(self) -> None:
        self.ended = True


@pytest.mark.usefixtures("two_ranks")
def test_ranks_that_cannot_share_a_server_are_told_how_to_start_one() -> None:
    serving._check(models(), State())
    with pytest.raises(ParallelError, match=r"without a model on its command line.*run --tp N"):
        serving._check(SimpleNamespace(force_model=None, loaded_models={}), State())
    alone = State()
    alone._continuous_batching = False
    with pytest.raises(ParallelError, match="without --continuous-batching"):
        serving._check(models(), alone)
    with pytest.raises(ParallelError, match="not sharded over all of them"):
        serving._check(models(1), State())


@pytest.mark.usefixtures("two_ranks")
def test_the_others_begin_once_and_end() -> None:
    led, state, follower = models(), State(), serving._Commands()
    serving._lead(led, state)
    assert follower.get() is None
    for _ in range(2):  # a request each
        state.get_manager("a@main", use_cb=True).init_cb(None, "settings of the first")
    assert follower.get() == ("begin", "settings of the first")
    assert follower.get() is None
    led.shutdown()
    assert state.ended
    assert follower.get() == ("end", None)


@pytest.mark.usefixtures("two_ranks")
def test_requests_for_which_there_are_no_shared_batches_are_refused() -> None:
    state = State()
    serving._lead(models(), state)
    assert state.use_continuous_batching(None, "LLM")
    with pytest.raises(ParallelError, match="batches of texts only"):
        state.use_continuous_batching(None, "VLM")
