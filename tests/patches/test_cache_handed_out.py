"""Tensors that a layer of a cache has handed out, as they lie in its memory: read, kept and written to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from liteboost_adaptor.kv_cache import bind
from liteboost_adaptor.report import CallCounter


@pytest.fixture(autouse=True)
def _restored():
    with torch.no_grad():
        yield
    bind.restore_all()


def served(layer: Any) -> None:
    cache = DynamicCache()
    cache.layers = [layer]
    bind.appending(None, CallCounter())(cache)


def states(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, 3, count, 5, generator=generator) for _ in range(2))


def kept(layer: Any) -> torch.Tensor:
    """What a layer keeps, as it lies in its memory: who reads the attribute gets a tensor of its own."""
    return vars(layer)["keys"]


def address(layer: Any) -> int:
    """Where the memory of what a layer keeps begins; to ask the storage for it would be a write."""
    return torch._C._data_address(kept(layer))


def test_what_update_returns_is_written_without_a_trace_elsewhere():
    layer = DynamicLayer()
    served(layer)
    for step in range(3):
        layer.update(*states(4, step))
    former = layer.update(*states(1, 5))[0]
    before = former.clone()
    latest = layer.update(*states(1, 6))[0]
    expected = latest.clone()
    former.zero_()
    assert torch.equal(latest, expected) and torch.equal(kept(layer), expected)
    former.copy_(before)
    latest.mul_(2)
    assert torch.equal(former, before)
    new = states(1, 7)
    assert torch.equal(layer.update(*new)[0], torch.cat([2 * expected, new[0]], dim=2))
    latest.numpy()[...] = 0
    assert torch.equal(layer.update(*new)[0], torch.cat([2 * expected, new[0], new[0]], dim=2))


@pytest.mark.parametrize(
    "read",
    [
        lambda tensor: tensor.sum(),
        lambda tensor: tensor @ tensor.mT,
        lambda tensor: torch.nn.functional.scaled_dot_product_attention(tensor, tensor, tensor),
        lambda tensor: tensor.to(torch.bfloat16),
        lambda tensor: tensor.tolist(),
        lambda tensor: torch.cat([tensor, tensor], dim=2),
    ],
)
def test_reading_what_is_kept_copies_nothing(read: Any):
    layer = DynamicLayer()
    served(layer)
    for step in range(3):
        layer.update(*states(4, step))
    memory = address(layer)
    read(kept(layer))
    layer.update(*states(1, 3))
    assert address(layer) == memory
