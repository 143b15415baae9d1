"""Concatenations behind what is kept, rerouted inside a method."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from liteboost_adaptor.engine.appends import reroute_appends
from liteboost_adaptor.engine.source import SourceUnavailable


class Layer(nn.Module):
    """Bodies that are, and are not, a concatenation behind what is kept."""

    def kept(self, x: torch.Tensor) -> torch.Tensor:
        self.state = torch.cat([self.state, x], dim=1)
        return self.state

    def evicting(self) -> torch.Tensor:
        return torch.cat([self.state, self.evicted()], dim=1)

    def evicted(self) -> torch.Tensor:
        self.state = self.state[:, 1:]
        return torch.ones(1, 1)

    @classmethod
    def with_state(cls, count: int) -> Layer:
        made = cls()
        made.state = torch.zeros(1, count)
        return made

    def before(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.state], dim=1)

    def of_another(self, x: Any) -> torch.Tensor:
        return torch.cat([x.state, x.new], dim=1)

    def three(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.state, x, x], dim=1)

    def any_dimension(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([self.state, x], dim=dim)

    def another_self(self, x: torch.Tensor) -> torch.Tensor:
        self = x  # noqa: PLW0642
        return torch.cat([self.state, x], dim=1)


@pytest.mark.parametrize("name", ["before", "of_another", "three", "any_dimension"])
def test_other_concatenations_are_left(name: str):
    assert reroute_appends(getattr(Layer, name), None) is None


def test_another_self_is_refused():
    with pytest.raises(SourceUnavailable, match="assigns to self"):
        reroute_appends(Layer.another_self, None)


def test_the_dimension_is_the_written_one():
    layer, rest = Layer(), torch.ones(2, 1)
    layer.state = torch.zeros(2, 3)
    seen = []

    def append(*given: Any) -> torch.Tensor:
        seen.append(given)
        return rest

    rerouted, names = reroute_appends(Layer.kept, append)
    assert names == {"state"} and rerouted(layer, rest) is rest
    assert len(seen) == 1 and seen[0][0].shape == (2, 3) and seen[0][1:] == (layer, "state", rest, 1)
    assert layer.state is rest


def test_what_is_kept_is_read_before_what_is_new():
    layer = Layer()
    layer.state = torch.zeros(1, 2)
    order = []

    def append(held: Any, *given: Any) -> torch.Tensor:
        order.append(held.shape[1])
        return torch.cat([held, given[2]], dim=given[3])

    evicted, _ = reroute_appends(Layer.evicting, append)
    assert evicted(layer).shape == Layer.evicting(Layer.with_state(2)).shape
    assert order == [2]
