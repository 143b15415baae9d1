"""attention."""

from __future__ import annotations

import math

import torch
from fuzz import tensors
from fuzz.bounds import FP32, TINY, assert_within, double, exact
from fuzz.table import Case, fuzzes
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

HEAD_DIMS = st.one_of(st.sampled_from([0, 1, 8, 16, 17, 33, 64, 80, 128]), st.integers(0, 140))
LENGTHS = st.one_of(st.sampled_from([1, 1, 1, 2, 3, 5, 17, 33]), st.integers(0, 70))
KEYS = st.one_of(st.sampled_from([0, 1, 7, 63, 64, 65, 127, 129, 257]), st.integers(0, 300))
#: Long decode on several threads, whose keys are split among them and merged.
SPLIT = {"batch": 1, "kv_heads": 2, "groups": 2, "q_len": 2, "kv_len": 1201, "dim": 128, "value_dim": 120}


def _sizes(draw: DrawFn) -> dict[str, int]:
    if draw(st.integers(0, 24)) == 0:
        return SPLIT
    dim = draw(HEAD_DIMS)
    return {
        "batch": draw(st.sampled_from([1, 1, 2, 3, 0])),
        "kv_heads": draw(st.sampled_from([1, 1, 2, 3, 0])),
        "groups": draw(st.sampled_from([1, 2, 4, 5, 0])),
        "q_len": draw(LENGTHS),
        "kv_len": draw(KEYS),
        "dim": dim,
        "value_dim": dim if draw(st.booleans()) else draw(HEAD_DIMS),
    }


def _mask(draw: DrawFn, size: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    kind = draw(st.sampled_from(["none", "none", "bool", "float", "hidden"]))
    if kind == "none":
        return None
    # Each dimension whole, or broadcast.
    size = tuple(n if draw(st.integers(0, 2)) else 1 for n in size)
    if kind == "bool":
        return tensors.tensor(draw, size, torch.bool)
    mask = tensors.tensor(draw, size, tensors.same_or_float32(draw, dtype))
    if kind == "hidden":
        low = draw(st.sampled_from([torch.finfo(mask.dtype).min, -math.inf]))
        # In place, where several elements may be one place in memory.
        hidden = torch.rand(mask.untyped_storage().nbytes() // mask.element_size()) < 0.4
        whole = mask.as_strided(hidden.shape, (1,), 0)
        whole.copy_(torch.where(whole.isnan(), whole, torch.where(hidden, low, 0.0).to(mask.dtype)))
    return mask


@fuzzes("attention")
def attention(draw: DrawFn) -> Case:
    dtype, s = draw(tensors.DTYPES), _sizes(draw)
    heads = s["kv_heads"] * s["groups"]
    is_causal = draw(st.booleans())
    arguments = {
        "query": tensors.tensor(draw, (s["batch"], heads, s["q_len"], s["dim"]), dtype),
        "key": tensors.tensor(draw, (s["batch"], s["kv_heads"], s["kv_len"], s["dim"]), dtype),
        "value": tensors.tensor(
            draw, (s["batch"], s["kv_heads"], s["kv_len"], s["value_dim"]), dtype, draw(tensors.SCALES)
        ),
        "mask": _mask(draw, (s["batch"], heads, s["q_len"], s["kv_len"]), dtype),
        "scaling": draw(st.sampled_from([0.125, 1.0 / math.sqrt(max(s["dim"], 1)), 1.0, 0.0, -0.25])),
        "is_causal": is_causal,
        "sliding_window": draw(st.sampled_from([0, 0, 1, 5, 40, 1000, 2**62])) if is_causal else 0,
        "softcap": draw(st.sampled_from([0.0, 0.0, 5.0, 30.0])),
        "sinks": tensors.maybe(
            draw,
            draw(st.sampled_from([(heads,), (s["batch"], heads, s["q_len"])])),
            tensors.same_or_float32(draw, dtype),
        ),
    }
    return Case(arguments, lambda results: check("attention", results[0], arguments))


@fuzzes("attention_part")
def attention_part(draw: DrawFn) -> Case:
    arguments = attention(draw).arguments
    del arguments["sliding_window"], arguments["sinks"]
    return Case(arguments, lambda results: _check_part(results, arguments))


def _check_part(results: list[Tensor], arguments: dict) -> None:
    """The output as that of attention; ``lse`` within what the error of a logit and the sum explain."""
    output, lse = results
    assert lse.dtype == torch.float32
    check("attention_part", output, arguments, torch.float32)
    want = exact("attention_part", arguments)[1]
    unit = torch.finfo(arguments["query"].dtype).eps  # the sum is of rounded probabilities in bf16
    error = _logit_error(arguments) + (32 + arguments["key"].shape[2]) * FP32 + unit
    assert_within(lse, want, error + 4 * FP32 * want.abs().nan_to_num(0, 0, 0))


def check(op: str, result: Tensor, arguments: dict, dtype: torch.dtype | None = None) -> None:
    """Hold the result of an op that computes attention to what roundings explain.

    Args:
        dtype: Of the result, where it is not that of the query.
    """
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    want = exact(op, arguments)[0]
    assert result.dtype == (dtype or query.dtype)
    if not want.numel():
        return assert_within(result, want, 0.0)
    largest = largest_of(value)
    error = _logit_error(arguments)
    # Sums over the keys are added up block by block; each step rounds a product and a sum.
    sums = 2 * (32 + min(key.shape[2], 256) + key.shape[2] / 128) * FP32
    # Roundings of the result and, in bf16, of the probabilities.
    unit = torch.finfo(query.dtype).eps
    bound = unit * (want.abs() + largest) + (sums + 2 * math.expm1(2 * error)) * largest + TINY[query.dtype]
    assert_within(result, want, bound)


def _logit_error(arguments: dict) -> float:
    """How far a logit may be off; it acts on the probabilities through the exponential."""
    query, key, mask = arguments["query"], arguments["key"], arguments.get("mask")
    logits = abs(arguments["scaling"]) * norm_of(query) * norm_of(key) + arguments.get("softcap", 0.0)
    if mask is not None and mask.is_floating_point():
        finite = double(mask)[double(mask).abs() < 1e4]
        logits += largest_of(finite)
    return (16 + query.shape[-1] / 2) * FP32 * logits


def largest_of(states: Tensor) -> float:
    return double(states).abs().max().item() if states.numel() else 0.0


def norm_of(states: Tensor) -> float:
    return largest_of(double(states).norm(dim=-1))
