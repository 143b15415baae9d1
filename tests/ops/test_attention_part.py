"""`liteboost::attention_part` against float64, and parts of keys joined against all of them."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.attention_cases import DTYPES, FLOOR, make, make_mask, one_thread
from torch import Tensor

from liteboost_adaptor.ops.attention_part import attention_part, joined, with_sinks

__all__ = ["one_thread"]  # applies by being here

ops = torch.ops.liteboost
#: How far fp32 sums of rounded probabilities may be off, relative to the largest value and logit.
NEAR = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2e-6}

SIZES = [
    (1, 2, 2, 1, 33, 16, 16),
    (2, 4, 2, 1, 700, 64, 64),  # keys split between tasks
    (2, 6, 2, 70, 130, 40, 24),
    (1, 8, 1, 129, 129, 64, 64),
]


def double(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.double() for tensor in tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_against_float64(isa: str, dtype: torch.dtype, size: tuple[int, ...]) -> None:
    batch, heads, _, q_len, kv_len, dim, _ = size
    states = make(*size, dtype)
    for kind, causal, softcap in (
        ("", False, 0.0),
        ("", True, 3.0),
        ("bool", False, 0.0),
        ("float", True, 0.0),
    ):
        mask = make_mask(kind, batch, heads, q_len, kv_len, dtype) if kind else None
        output, lse = ops.attention_part(*states, mask, dim**-0.5, causal, softcap)
        wide = mask.double() if mask is not None and mask.is_floating_point() else mask
        exact, exact_lse = attention_part(*double(*states), wide, dim**-0.5, causal, softcap)
        assert output.dtype == lse.dtype == torch.float32
        assert output.shape == (batch, q_len, heads, size[-1]) and lse.shape == (batch, q_len, heads)
        largest = states[2].abs().max().item()
        assert (output - exact).abs().max() <= NEAR[dtype] * max(largest, 1) * 2
        seen = exact_lse.isfinite()
        assert torch.equal(lse.isfinite(), seen)
        assert (lse[seen] - exact_lse[seen]).abs().max() <= NEAR[dtype] * 8
        # The same sums as attention's, before they are rounded.
        assert torch.equal(output.to(dtype), ops.attention(*states, mask, dim**-0.5, causal, 0, softcap))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["", "heads", "queries"])
def test_joined_parts_are_the_whole(dtype: torch.dtype, kind: str) -> None:
    query, key, value = make(2, 4, 2, 50, 200, 32, 32, dtype)
    shape = {"": None, "heads": (4,), "queries": (2, 4, 50)}[kind]
    sinks = torch.randn(shape) if shape else None
    mask = torch.rand(2, 1, 50, 200) < 0.5
    mask[0, :, 3] = False  # sees no key
    mask[0, :, 4, :150] = False  # only keys of the last part
    bounds = [0, 1, 70, 150, 200]
    found, lse = ops.attention_part(query, key[:, :, :0], value[:, :, :0], None, 0.2)
    for a, b in itertools.pairwise(bounds):
        part = ops.attention_part(query, key[:, :, a:b], value[:, :, a:b], mask[..., a:b], 0.2)
        found, lse = joined(found, lse, *part)
    found = found if sinks is None else with_sinks(found, lse, sinks)
    exact = ops.attention(query, key, value, mask, 0.2, sinks=sinks).double()
    whole = torch.equal(found[0, 3], torch.zeros_like(found[0, 3]))
    assert whole and not found.isnan().any()
    assert (found - exact).abs().max() <= 4 * FLOOR[dtype] * value.abs().max() + 4e-6


def test_no_keys() -> None:
    query, key, value = make(1, 2, 1, 3, 0, 8, 8, torch.bfloat16)
    output, lse = ops.attention_part(query, key, value, None, 1.0)
    assert not output.any() and output.shape == (1, 3, 2, 8) and output.dtype == torch.float32
    assert bool((lse == -torch.inf).all())


def test_traces() -> None:
    states = make(1, 2, 1, 3, 9, 8, 8, torch.float32)
    torch.library.opcheck(ops.attention_part.default, (*states, None, 0.3, True, 0.0))


def test_refuses_what_does_not_fit() -> None:
    query, key, value = make(1, 2, 1, 3, 9, 8, 8, torch.float32)
    with pytest.raises(ValueError, match=r"attention_part.*batch, num_kv_heads and kv_len of key"):
        ops.attention_part(query, key, value[:, :, 1:], None, 0.3)
    with pytest.raises(ValueError, match=r"attention_part.*scaling must be finite"):
        ops.attention_part(query, key, value, None, float("nan"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_under_the_lowest_mask_is_an_ordinary_row(isa: str, dtype: torch.dtype) -> None:
    """Beside such a number the logarithm of how many keys there are is nothing."""
    states = make(1, 2, 1, 4, 40, 16, 16, dtype)
    mask = torch.zeros(1, 1, 4, 1, dtype=dtype)
    mask[:, :, 2] = torch.finfo(dtype).min
    for function in (ops.attention_part, attention_part):
        output, lse = function(*states, mask, 0.0)
        mean = states[2].float().mean(2).unsqueeze(1).expand_as(output)
        torch.testing.assert_close(output, mean, rtol=2**-7, atol=2**-7)
        assert lse.isfinite().all()


@pytest.mark.parametrize("kind", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_lse_of_what_is_not_finite(isa: str, kind: float) -> None:
    for kv_len in (5, 40, 700):
        query, key, value = make(1, 2, 2, 2, kv_len, 16, 16, torch.float32)
        query[:, :, 1, 3] = kind
        for form in ((None, 0.2), (None, 0.2, True)):
            output, lse = ops.attention_part(query, key, value, *form)
            exact, exact_lse = attention_part(*double(query, key, value), *form)
            assert torch.equal(output.isnan(), exact.isnan())
            torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5, equal_nan=True)
