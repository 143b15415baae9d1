"""causal_conv1d, causal_conv1d_update."""

from __future__ import annotations

from typing import Any

import torch
from fuzz import tensors
from fuzz.bounds import FP32, TINY, UNIT, assert_same, assert_within, double
from fuzz.table import Case, fuzzes
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

from liteboost_adaptor.ops import causal_conv


def _inputs(draw: DrawFn) -> dict[str, Any]:
    dtype, taps = draw(tensors.DTYPES), draw(st.sampled_from([1, 2, 3, 4, 4, 7]))
    batch, channels = draw(tensors.COUNTS), draw(tensors.WIDTHS)
    tokens = draw(st.sampled_from([0, 1, 1, 2, 3, 5, 8, 17, 63, 64, 65, 129]))
    if batch * channels * tokens > tensors.MOST:
        batch, channels = 1, min(channels, 66)
    return {
        "x": tensors.tensor(draw, (batch, channels, tokens), dtype, draw(tensors.SCALES)),
        "weight": tensors.tensor(draw, (channels, taps), dtype),
        "bias": tensors.maybe(draw, (channels,), dtype),
        "activation": draw(st.sampled_from(causal_conv.ACTIVATIONS)),
    }


def _check(arguments: dict[str, Any], state: Tensor, results: list[Tensor]) -> None:
    """``state``: what stands before ``x``."""
    x, weight, bias = arguments["x"], arguments["weight"], arguments["bias"]
    both = torch.cat([double(state), double(x)], -1)

    def plain(change: Any) -> Tensor:
        rest = None if bias is None else change(double(bias))
        parts = change(both)[..., : state.shape[2]].clone(), change(both)[..., state.shape[2] :]
        return causal_conv.causal_conv1d_update(parts[1], parts[0], change(double(weight)), rest)

    want, size = plain(lambda value: value), plain(torch.abs)
    # An activation errs with the argument, and by itself; its slope is 1.1 at most.
    noise = (32 + 2 * weight.shape[1]) * FP32 * size
    if arguments["activation"] == "silu":
        want, noise = torch.nn.functional.silu(want), 1.1 * noise + 4 * FP32 * size * want.abs()
    assert results[0].dtype == x.dtype
    assert_within(results[0], want, 1.01 * UNIT[x.dtype] * want.abs() + noise + TINY[x.dtype])


@fuzzes("causal_conv1d")
def causal_conv1d(draw: DrawFn) -> Case:
    arguments = _inputs(draw)
    x, before = arguments["x"], arguments["weight"].shape[1] - 1
    return Case(arguments, lambda results: _check(arguments, x.new_zeros(*x.shape[:2], before), results))


@fuzzes("causal_conv1d_update")
def causal_conv1d_update(draw: DrawFn) -> Case:
    arguments = _inputs(draw)
    x, before = arguments["x"], arguments["weight"].shape[1] - 1
    length = before + draw(st.integers(0, 3))
    state = tensors.tensor(draw, (*x.shape[:2], length), x.dtype, layouts=tensors.WRITABLE)

    def check(results: list[Tensor]) -> None:
        _check(arguments, state, results[:1])
        both = torch.cat([state, x], -1)
        assert_same(results[1], both[..., both.shape[-1] - length :])

    return Case({**arguments, "state": state}, check)
