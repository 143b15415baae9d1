"""recurrent_gated_delta_rule, chunk_gated_delta_rule."""

from __future__ import annotations

from typing import Any

import torch
from fuzz import tensors
from fuzz.bounds import FP32, TINY, UNIT, assert_within, double
from fuzz.table import Case, fuzzes
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

from liteboost_adaptor.ops import delta_rule

DIMS = st.sampled_from([1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 65, 70, 0])


def _inputs(draw: DrawFn) -> tuple[dict[str, Any], tuple[int, ...]]:
    """What both ops take, and the shape of a state. Keys are of length 1: else states explode."""
    dtype, k_dim, v_dim = draw(tensors.DTYPES), draw(DIMS), draw(DIMS)
    k_heads = draw(st.integers(1, 3))
    v_heads = k_heads * draw(st.integers(0, 3))
    batch, tokens = draw(tensors.COUNTS), draw(st.sampled_from([0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 12, 17]))
    if batch * v_heads * k_dim * v_dim > tensors.MOST:
        k_heads = v_heads = batch = 1
    lead = (batch, tokens)

    def rates(bound: float) -> Tensor:
        rate = tensors.tensor(draw, (*lead, v_heads), tensors.same_or_float32(draw, dtype))
        memory = torch.tensor([], dtype=rate.dtype).set_(rate.untyped_storage())
        memory.abs_().mul_(bound)  # NaN, where the tensor does not show it, stays
        return rate

    normalize = draw(st.booleans())
    arguments = {
        "query": tensors.tensor(draw, (*lead, k_heads, k_dim), dtype, draw(tensors.SCALES)),
        "key": tensors.tensor(
            draw, (*lead, k_heads, k_dim), dtype, 1.0 if normalize else max(k_dim, 1) ** -0.5
        ),
        "value": tensors.tensor(draw, (*lead, v_heads, v_dim), dtype, draw(tensors.SCALES)),
        "g": rates(draw(st.sampled_from([-1.0, -0.1, -30.0]))),
        "beta": rates(0.5),
        "scaling": draw(st.sampled_from([1.0, 0.125])),
        "normalize": normalize,
    }
    return arguments, (batch, v_heads, k_dim, v_dim)


def _sizes(arguments: dict[str, Any], state: Tensor | None) -> tuple[Tensor, Tensor]:
    """What the result and the final state would be if nothing ever cancelled."""
    query, key, value, g, beta = (double(arguments[name]) for name in ("query", "key", "value", "g", "beta"))
    if arguments["normalize"]:
        query, key = (
            x * torch.rsqrt(x.square().sum(-1, keepdim=True) + delta_rule.EPS) for x in (query, key)
        )
    group = value.shape[2] // max(key.shape[2], 1)
    query, key = (x.abs().repeat_interleave(group, 2) for x in (query * arguments["scaling"], key))
    batch, tokens, heads, v_dim = value.shape
    size = (
        torch.zeros(batch, heads, key.shape[3], v_dim, dtype=torch.float64)
        if state is None
        else double(state).abs()
    )
    out = torch.zeros(value.shape, dtype=torch.float64)
    for t in range(tokens):
        size = size * g[:, t, :, None, None].exp()
        delta = beta[:, t, :, None] * (value[:, t].abs() + (size * key[:, t, :, :, None]).sum(-2))
        size = size + key[:, t, :, :, None] * delta[:, :, None, :]
        out[:, t] = (size * query[:, t, :, :, None]).sum(-2)
    return out, size


def _check(arguments: dict[str, Any], state: Tensor | None, results: list[Tensor]) -> None:
    out, final = results
    dtype = arguments["value"].dtype
    assert out.dtype == dtype and final.dtype == torch.float32
    initial = None if state is None else double(state)
    inputs = {name: double(value) for name, value in arguments.items()}
    want_out, want_final = delta_rule.chunk_gated_delta_rule(**inputs, initial_state=initial)
    size_out, size_final = _sizes(arguments, state)
    # Each token's sums over the head's dimensions and over the chunk, on what the tokens before have left.
    noise = (1 + out.shape[1]) * (48 + arguments["key"].shape[3]) * FP32
    assert_within(out, want_out, 1.01 * UNIT[dtype] * want_out.abs() + noise * size_out + TINY[dtype])
    assert_within(final, want_final, noise * size_final + TINY[torch.float32])


@fuzzes("recurrent_gated_delta_rule")
def recurrent_gated_delta_rule(draw: DrawFn) -> Case:
    arguments, shape = _inputs(draw)
    state = tensors.tensor(draw, shape, torch.float32, layouts=tensors.WRITABLE)
    return Case({**arguments, "state": state}, lambda results: _check(arguments, state, results))


@fuzzes("chunk_gated_delta_rule")
def chunk_gated_delta_rule(draw: DrawFn) -> Case:
    arguments, shape = _inputs(draw)
    state = tensors.maybe(draw, shape, torch.float32)
    return Case({**arguments, "initial_state": state}, lambda results: _check(arguments, state, results))
