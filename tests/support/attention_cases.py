"""Inputs, the usual eager code and the error bound for the tests of `liteboost::attention`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAN = float("nan")

# Beyond 1.5 times the original's error: other orders of the fp32 sums, and a part of one output rounding
# where the original's few roundings happen to be lucky.
FLOOR = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-11, torch.float16: 2.0**-14}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small inputs: on a busy machine their threads would wait for each other far longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(
    batch: int,
    heads: int,
    kv_heads: int,
    q_len: int,
    kv_len: int,
    dim: int,
    value_dim: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(batch, heads, q_len, dim, dtype=torch.float32).to(dtype)
    key = torch.randn(batch, kv_heads, kv_len, dim, dtype=torch.float32).to(dtype)
    value = torch.randn(batch, kv_heads, kv_len, value_dim, dtype=torch.float32).to(dtype)
    return query, key, value


def eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    is_causal: bool = False,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """The usual eager code: each step in the dtype of the tensors, softmax in fp32, or all in float64."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = query @ key.transpose(2, 3) * scaling
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    q_len, kv_len = logits.shape[-2:]
    ages = torch.arange(q_len)[:, None] + kv_len - q_len - torch.arange(kv_len)
    if is_causal:
        logits = logits.masked_fill(ages < 0, -torch.inf)
    if sliding_window:
        logits = logits.masked_fill(ages >= sliding_window, -torch.inf)
    if mask is not None and mask.dtype == torch.bool:
        logits = logits.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        logits = logits + mask.to(logits.dtype)
    if sinks is not None:
        column = sinks[:, None].expand(logits.shape[:3]) if sinks.dim() == 1 else sinks
        column = column.to(logits.dtype).unsqueeze(-1)
        logits = torch.cat([logits, column], dim=-1)
    weights = torch.softmax(logits, -1, dtype=torch.promote_types(query.dtype, torch.float32))
    weights = weights.nan_to_num(0.0).to(query.dtype)  # no key seen
    return (weights[..., :kv_len] @ value).transpose(1, 2)


def double(value: object) -> object:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def check(*args: object, exact: Tensor | None = None, **kwargs: object) -> Tensor:
    """Shape, dtype, layout, each element's error, and the whole's against the original's."""
    query, key, value = args[:3]
    result = torch.ops.liteboost.attention(*args, **kwargs)
    wide = [double(arg) for arg in args], {name: double(arg) for name, arg in kwargs.items()}
    if exact is None:
        exact = eager(*wide[0], **wide[1])
    assert result.shape == (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    assert result.dtype == query.dtype and result.is_contiguous()
    if result.numel() == 0 or key.shape[2] == 0:
        assert not result.any()
        return result
    error = (result.double() - exact).abs()
    # Roundings of the result and, in bf16, of the probabilities; those of logits act through the exponential.
    unit = torch.finfo(query.dtype).eps
    assert (
        error <= unit * (exact.abs() + value.double().abs().max()) + 2e-6 * value.double().abs().max()
    ).all()
    if result.numel() >= 60:  # so few may all be lucky in the original
        original = eager(*args, **kwargs).double() - exact
        assert error.norm() <= 1.5 * original.norm() + FLOOR[query.dtype] * exact.norm() + 1e-30
    return result


# batch, heads, kv heads, q_len, kv_len, head_dim, value_dim: read in place and packed, whole and ragged.
SHAPES = [
    (1, 4, 4, 1, 129, 64, 64),
    (2, 8, 2, 1, 70, 80, 80),
    (1, 16, 1, 1, 300, 64, 96),
    (1, 8, 4, 3, 257, 128, 128),
    (2, 4, 1, 63, 129, 64, 64),
    (1, 2, 1, 129, 290, 128, 128),
    (1, 3, 3, 5, 33, 17, 9),
]

MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "sliding_window": 40},
    "softcap": {"softcap": 3.0, "is_causal": True},
    "sinks": {"sinks": "heads", "is_causal": True},
    "query_sinks": {"sinks": "queries", "mask": "float"},
    "padding": {"mask": "padding", "is_causal": True},
    "bool": {"mask": "bool"},
    "bool_heads": {"mask": "bool_heads", "is_causal": True, "sliding_window": 100},
    "float": {"mask": "float"},
    "float32": {"mask": "float32", "softcap": 5.0},
    "min": {"mask": "min", "sinks": "heads"},
    "infinite": {"mask": "infinite", "is_causal": True},
    "everything": {
        "mask": "bool",
        "is_causal": True,
        "sliding_window": 30,
        "softcap": 2.0,
        "sinks": "queries",
    },
}


def make_sinks(kind: str, batch: int, heads: int, q_len: int, dtype: torch.dtype) -> Tensor:
    """One logit a head, or a query; the latter as a module makes them, heads last in memory."""
    if kind == "heads":
        return torch.randn(heads).to(dtype)
    return torch.randn(batch, q_len, heads).to(dtype).transpose(1, 2)


def make_mask(kind: str, batch: int, heads: int, q_len: int, kv_len: int, dtype: torch.dtype) -> Tensor:
    if kind == "padding":  # left padding, as generate() gives it: one row of keys a sequence, expanded
        lengths = torch.randint(0, max(kv_len // 2, 1), (batch, 1, 1, 1))
        return (torch.arange(kv_len) >= lengths).expand(batch, 1, q_len, kv_len)
    if kind == "bool":
        return torch.rand(batch, 1, q_len, kv_len) > 0.4
    if kind == "bool_heads":
        return torch.rand(1, heads, q_len, kv_len) > 0.4
    if kind == "float32":
        return torch.randn(batch, heads, q_len, kv_len)
    if kind == "float":
        return torch.randn(batch, heads, 1, kv_len).to(dtype).expand(batch, heads, q_len, kv_len)
    low = torch.finfo(dtype).min if kind == "min" else -torch.inf
    return torch.zeros(batch, 1, q_len, kv_len, dtype=dtype).masked_fill(
        torch.rand(batch, 1, q_len, kv_len) > 0.6, low
    )
