"""`liteboost::attention` beside its values: layouts, memory, reference, tracing, errors."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from support.attention_cases import (
    DTYPES,
    MASKS,
    NAN,
    SHAPES,
    check,
    double,
    eager,
    make,
    make_mask,
    make_sinks,
    one_thread,
)
from torch import Tensor

from liteboost_adaptor.ops.attention import attention as reference

__all__ = ["one_thread"]  # applies by being here

attention = torch.ops.liteboost.attention


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_len", [1, 4, 50])
def test_layouts(isa: str, dtype: torch.dtype, q_len: int) -> None:
    query, key, value = make(2, 8, 2, q_len, 90, 64, 64, dtype)
    expected = attention(query, key, value, None, 0.125, is_causal=True)

    def same(*states: Tensor) -> None:
        torch.testing.assert_close(attention(*states, None, 0.125, is_causal=True), expected)

    def sequence_major(states: Tensor) -> Tensor:
        return states.transpose(1, 2).contiguous().transpose(1, 2)

    def column_major(states: Tensor) -> Tensor:
        return states.transpose(2, 3).contiguous().transpose(2, 3)

    def amid_nan(states: Tensor) -> Tensor:
        """At an odd offset in a larger tensor; what lies around it spoils all if it is read."""
        room = torch.full([size + 3 for size in states.shape], NAN, dtype=dtype)
        view = room[1:-2, 2:-1, 1:-2, 1:-2]
        view.copy_(states)
        return view

    same(sequence_major(query), sequence_major(key), sequence_major(value))
    same(column_major(query), column_major(key), column_major(value))
    same(amid_nan(query), amid_nan(key), amid_nan(value))
    same(query, amid_nan(key), sequence_major(value))
    same(query[:, :, :, [*range(64)]], key.clone(memory_format=torch.channels_last), value)
    merged = torch.cat([states.transpose(1, 2).flatten(2) for states in (key, value)], dim=-1)
    same(query, *(part.unflatten(2, (2, 64)).transpose(1, 2) for part in merged.split(128, dim=-1)))
    one = query[:1], key[:1], value[:1]
    both = attention(*(states.expand(2, -1, -1, -1) for states in one), None, 0.125, is_causal=True)
    torch.testing.assert_close(both, expected[:1].expand(2, -1, -1, -1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_len", [1, 50])
def test_mask_layouts(isa: str, dtype: torch.dtype, q_len: int) -> None:
    states = make(2, 4, 2, q_len, 90, 32, 32, dtype)
    for shape in ((2, 4, q_len, 90), (1, 4, q_len, 1), (2, 1, 1, 90), (1, 1, 1, 1), (2, 1, q_len, 90)):
        for mask in (torch.rand(shape) > 0.3, torch.randn(shape), torch.randn(shape).to(dtype)):
            expected = check(*states, mask, 0.2)
            views = [mask.transpose(2, 3).contiguous().transpose(2, 3), mask.expand(2, 4, q_len, 90)]
            room = torch.ones([size + 2 for size in shape], dtype=mask.dtype)
            if mask.is_floating_point():
                room.fill_(NAN)
            views.append(room[1:-1, 1:-1, 1:-1, 1:-1].copy_(mask))
            for view in views:
                torch.testing.assert_close(attention(*states, view, 0.2), expected)


def test_memory_is_not_quadratic(native_only: None) -> None:
    """The scores of 8,192 tokens and 2 heads are 512 MiB in fp32; the peak may grow by a tenth of that."""
    script = """
import resource
import torch
from liteboost_adaptor import native
native.load()
def run(length):
    states = torch.randn(1, 2, length, 16)
    mask = torch.ones(1, 1, 1, length, dtype=torch.bool).expand(1, 1, length, length)
    torch.ops.liteboost.attention(states, states, states, None, 0.25, is_causal=True)
    torch.ops.liteboost.attention(states, states, states, mask, 0.25)
run(512)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(8192)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    assert int(done.stdout) < 51


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_reference(dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("liteboost_adaptor.ops.attention.QUERY_BLOCK", 64)
    for shape in SHAPES:
        batch, heads, _, q_len, kv_len, dim, _ = shape
        options = dict(MASKS[kind])
        mask = options.pop("mask", None)
        if mask is not None:
            mask = make_mask(mask, batch, heads, q_len, kv_len, dtype)
        if sinks := options.pop("sinks", ""):
            options["sinks"] = make_sinks(sinks, batch, heads, q_len, dtype)
        args = (*make(*shape, dtype), mask, dim**-0.5)
        exact = eager(*map(double, args), **{name: double(value) for name, value in options.items()})
        result = reference(*args, **options)
        assert result.dtype == dtype and result.is_contiguous()
        tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float64: 1e-12}[dtype]
        torch.testing.assert_close(result.double(), exact, rtol=tolerance, atol=tolerance)


def test_windows_beyond_the_keys_hide_nothing() -> None:
    states = make(1, 4, 2, 20, 30, 16, 16, torch.float32)
    expected = attention(*states, None, 0.25, is_causal=True)
    for window in (30, 31, 2**63 - 1):
        result = attention(*states, None, 0.25, is_causal=True, sliding_window=window)
        assert torch.equal(result, expected)


def test_reference_of_empty_sizes() -> None:
    for shape in ((1, 4, 2, 3, 0, 8, 8), (1, 4, 2, 0, 3, 8, 8), (0, 4, 2, 3, 3, 8, 8), (1, 0, 0, 3, 3, 8, 8)):
        states = make(*shape, torch.float32)
        native, plain = attention(*states, None, 1.0), reference(*states, None, 1.0)
        assert torch.equal(native, plain) and native.shape == plain.shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_len", [1, 9])
def test_opcheck(dtype: torch.dtype, q_len: int) -> None:
    states = make(2, 4, 2, q_len, 12, 16, 8, dtype)
    mask = torch.rand(2, 1, q_len, 12) > 0.3
    torch.library.opcheck(attention, (*states, None, 0.25), {"is_causal": True, "sliding_window": 4})
    torch.library.opcheck(
        attention, (*states, mask, 0.25), {"softcap": 2.0, "sinks": torch.randn(4).to(dtype)}
    )
    torch.library.opcheck(attention, (*states, mask, 0.25), {"sinks": torch.randn(2, 4, q_len)})
    batch_inside = (part.transpose(0, 1).contiguous().transpose(0, 1) for part in states)
    torch.library.opcheck(attention, (*batch_inside, None, 1.0))


def test_compiles_with_dynamic_lengths() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, key, value, None, 0.25, is_causal=True).flatten(2)

    for q_len, kv_len in ((5, 9), (6, 20), (3, 11)):
        states = make(1, 4, 2, q_len, kv_len, 16, 16, torch.float32)
        torch.testing.assert_close(run(*states), attention(*states, None, 0.25, is_causal=True).flatten(2))


ERRORS = [
    (
        {"query": torch.zeros(4, 3, 8)},
        ValueError,
        "query must have shape [batch, num_heads, q_len, head_dim]",
    ),
    (
        {"key": torch.zeros(2, 5, 8)},
        ValueError,
        "key must have shape [batch, num_kv_heads, kv_len, head_dim]",
    ),
    (
        {"value": torch.zeros(5, 8)},
        ValueError,
        "value must have shape [batch, num_kv_heads, kv_len, value_dim]",
    ),
    ({"key": torch.zeros(2, 2, 5, 8)}, ValueError, "key must have the batch size of query = 1, got 2"),
    ({"key": torch.zeros(1, 2, 5, 4)}, ValueError, "key must have the head_dim of query = 8, got 4"),
    (
        {"value": torch.zeros(1, 2, 6, 8)},
        ValueError,
        "value must have the batch, num_kv_heads and kv_len of key",
    ),
    (
        {"value": torch.zeros(1, 1, 5, 8)},
        ValueError,
        "value must have the batch, num_kv_heads and kv_len of key",
    ),
    (
        {"key": torch.zeros(1, 3, 5, 8), "value": torch.zeros(1, 3, 5, 8)},
        ValueError,
        "key must have a number of heads that divides num_heads of query = 4, got 3",
    ),
    (
        {"query": torch.zeros(1, 4, 3, 8, dtype=torch.int32)},
        TypeError,
        "query must be float32, bfloat16 or float16",
    ),
    ({"key": torch.zeros(1, 2, 5, 8).bfloat16()}, TypeError, "key must have the dtype of query"),
    ({"value": torch.zeros(1, 2, 5, 8).half()}, TypeError, "value must have the dtype of query"),
    (
        {"mask": torch.zeros(3, 5)},
        ValueError,
        "mask must broadcast to [batch, num_heads, q_len, kv_len] = [1, 4, 3, 5]",
    ),
    (
        {"mask": torch.zeros(1, 1, 3, 9)},
        ValueError,
        "got [1, 1, 3, 9]; give it four dimensions, cut to kv_len",
    ),
    ({"mask": torch.zeros(1, 2, 3, 5)}, ValueError, "mask must broadcast to"),
    (
        {"mask": torch.zeros(1, 1, 3, 5, dtype=torch.int64)},
        TypeError,
        "mask must be bool, float32 or of the dtype",
    ),
    ({"mask": torch.zeros(1, 1, 3, 5).half()}, TypeError, "mask must be bool, float32 or of the dtype"),
    (
        {"sinks": torch.zeros(2)},
        ValueError,
        "sinks must have shape [num_heads] = [4] or [batch, num_heads, q_len] = [1, 4, 3], got [2]; pass",
    ),
    ({"sinks": torch.zeros(1, 3, 4)}, ValueError, "= [1, 4, 3], got [1, 3, 4]; pass one logit"),
    ({"sinks": torch.zeros(4).half()}, TypeError, "sinks must have the dtype of query"),
    ({"scaling": NAN}, ValueError, "scaling must be finite, got nan"),
    ({"softcap": -1.0}, ValueError, "softcap must be finite and not negative, got -1"),
    ({"is_causal": True, "sliding_window": -2}, ValueError, "sliding_window must not be negative, got -2"),
    ({"sliding_window": 2}, ValueError, "sliding_window needs is_causal = True"),
    ({"key": torch.zeros(1, 2, 5, 8, device="meta")}, ValueError, "key must be on the device of query"),
    ({"mask": torch.zeros(1, 1, 3, 5, device="meta")}, ValueError, "mask must be on the device of query"),
]


@pytest.mark.parametrize("wrong, error, text", ERRORS, ids=[text for _, _, text in ERRORS])
@pytest.mark.parametrize("function", [attention, reference], ids=["op", "reference"])
def test_errors(function: object, wrong: dict[str, object], error: type[Exception], text: str) -> None:
    args: dict[str, object] = {
        "query": torch.zeros(1, 4, 3, 8),
        "key": torch.zeros(1, 2, 5, 8),
        "value": torch.zeros(1, 2, 5, 8),
        "mask": None,
        "scaling": 1.0,
    }
    with pytest.raises(error) as caught:
        function(**{**args, **wrong})
    assert text in str(caught.value) and "liteboost::attention: " in str(caught.value)


def test_float64_is_refused(native_only: None) -> None:
    with pytest.raises(TypeError, match="query must be float32, bfloat16 or float16, got"):
        attention(*make(1, 2, 2, 3, 3, 4, 4, torch.float64), None, 1.0)


@pytest.mark.parametrize("which", ["query", "key", "value", "mask", "sinks"])
def test_gradients_are_refused(which: str) -> None:
    query, key, value = make(1, 2, 2, 3, 3, 4, 4, torch.float32)
    args = {
        "query": query,
        "key": key,
        "value": value,
        "mask": torch.zeros(1, 1, 3, 3),
        "sinks": torch.zeros(2),
    }
    args[which] = args[which].requires_grad_()
    with pytest.raises(RuntimeError, match=r"attention: has no backward, but .* requires grad"):
        attention(**args, scaling=1.0)
    with torch.no_grad():
        assert attention(**args, scaling=1.0).isfinite().all()
