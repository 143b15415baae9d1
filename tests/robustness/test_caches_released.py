"""Caches that another thread releases (an undo, a model bound anew) while this one appends to them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from liteboost_adaptor.kv_cache import bind, int8_layers
from liteboost_adaptor.kv_cache import layers as cache_layers
from liteboost_adaptor.report import CallCounter


@pytest.fixture(autouse=True)
def _restored():
    yield
    bind.restore_all()


def states(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, 3, 1, 64, generator=generator) for _ in range(2))


def layer_served(has_integers: bool) -> Any:
    cache, module = DynamicCache(), torch.nn.Module()
    cache.layers = [DynamicLayer()]
    if has_integers:
        int8_layers.want(module)
    bind.appending(None, CallCounter())(cache, module)
    assert cache_layers.served(cache.layers[0]).has_integers == has_integers
    return cache.layers[0]


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "gives up"])
@pytest.mark.parametrize("has_integers", [False, True], ids=["values", "integers"])
def test_a_cache_released_while_a_thread_appends(
    has_integers: bool, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_served(has_integers)
    for seed in range(3):
        layer.update(*states(seed))
    amid, tries, released = threading.Event(), threading.Event(), []

    def release() -> None:
        amid.wait()
        tries.set()
        bind.restore_all()
        released.append(True)

    entry = cache_layers.served(layer)

    def slowly(held: Any, layer: Any, name: str, *rest: Any) -> Any:
        result = entry.append(held, layer, name, *rest)
        if name == "keys":  # the values come later
            amid.set()
            tries.wait()
            other.join(0.2 if waits else None)
            assert waits == (not released)
        return result

    monkeypatch.setattr(cache_layers, "MOST_WAIT", 60.0 if waits else 0.0)
    changed = cache_layers.Served(entry.layer, slowly, entry.has_integers)
    monkeypatch.setitem(cache_layers._served, id(layer), changed)
    other = threading.Thread(target=release)
    other.start()
    keys, values = layer.update(*states(3))
    other.join()

    expected = [torch.cat(parts, dim=2) for parts in zip(*map(states, range(4)), strict=True)]
    tolerance = 0.02 if has_integers else 0
    for found, kept, wanted in zip((keys, values), (layer.keys, layer.values), expected, strict=True):
        assert (torch.as_tensor(found + 0) - wanted).abs().max() <= tolerance
        assert (kept - wanted).abs().max() <= tolerance
    # And it goes on, served by nobody, as transformers' own.
    assert cache_layers.served(layer) is None
    layer.update(*states(4))
    assert layer.keys.shape[2] == 5 and torch.equal(layer.keys[:, :, 4:], states(4)[0])


def test_a_thread_may_release_amid_an_append_of_its_own() -> None:
    with cache_layers.using():
        bind.restore_all()
    assert cache_layers.using().acquire(blocking=False)
    cache_layers.using().release()
