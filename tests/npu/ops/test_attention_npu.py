"""Attention as one aclnn operator: what it gives, in which layouts, and what is left to the reference."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from cann_sim.trace import recording
from npu.simulator.programs import output
from support.attention_cases import double

from liteboost_adaptor import native_npu

ops = torch.ops.liteboost
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SIZES = ((1, 7), (5, 5), (3, 9), (17, 17), (1, 130))


def states(q_len: int, kv_len: int, dtype: torch.dtype, head_dim: int = 64) -> tuple[torch.Tensor, ...]:
    """Query, key and value of 2 x 4 and 2 heads as a projection leaves them: ``[B, S, N, D]`` transposed."""
    sizes = ((q_len, 4), (kv_len, 2), (kv_len, 2))
    return tuple(
        torch.randn(2, length, heads, head_dim, dtype=dtype).transpose(1, 2) for length, heads in sizes
    )


def check(arguments: list[Any], cached: bool) -> None:
    """The op on the NPU against the reference in float64; ``cached``: keys and values as in a cache."""
    dtype = arguments[0].dtype
    expected = torch.ops.liteboost_reference.attention(*map(double, arguments))
    query, key, value, *others = arguments
    if cached:
        key, value = key.contiguous(), value.contiguous()
    on_npu = [x.transpose(1, 2).npu().transpose(1, 2) for x in (query, key, value)]
    on_npu = [x.contiguous() if cached and x is not on_npu[0] else x for x in on_npu]
    rest = [x.npu() if isinstance(x, torch.Tensor) else x for x in others]
    found = ops.attention(*on_npu, *rest)
    assert found.is_contiguous()
    assert (found.cpu().double() - expected).abs().max() <= TOLERANCE[dtype]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("case", ["plain", "causal", "mask", "window"])
@pytest.mark.parametrize(("q_len", "kv_len"), SIZES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_lengths_masks_and_layouts(
    dtype: torch.dtype, q_len: int, kv_len: int, case: str, cached: bool
) -> None:
    mask = torch.rand(2, 1, q_len, kv_len) > 0.3 if case == "mask" else None
    causal, window = case in ("causal", "window"), 3 if case == "window" else 0
    check([*states(q_len, kv_len, dtype), mask, 0.125, causal, window, 0.0, None], cached)
    assert native_npu.calls() == [("attention", "", 1)]


@pytest.mark.parametrize("head_dim", [48, 64, 128])
@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_that_see_no_key_are_zero(dtype: torch.dtype, q_len: int, head_dim: int) -> None:
    mask = torch.ones(2, 1, q_len, 5, dtype=torch.bool).tril(5 - q_len)
    mask[0, :, 0] = False
    q, k, v = states(q_len, 5, dtype, head_dim)
    arguments = [q, k, v, mask, 0.125, False, 0, 0.0, None]
    expected = torch.ops.liteboost_reference.attention(*arguments)
    assert not expected[0, 0].any() and expected[1, 0].any()
    check(arguments, True)
    assert all(not reason for _, reason, _ in native_npu.calls())


@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_mask_may_be_one_for_all_sequences(dtype: torch.dtype, q_len: int) -> None:
    mask = torch.ones(1, 1, q_len, 9, dtype=torch.bool)
    mask[..., :3] = False
    check([*states(q_len, 9, dtype), mask, 0.125, False, 0, 0.0, None], True)
    assert native_npu.calls() == [("attention", "", 1)]


def test_a_call_runs_on_the_device_of_its_tensors() -> None:
    """Its launches stand in a queue of the tensors' device, also where that is not the current one."""
    q, k, v = (x.to("npu:1") for x in states(5, 5, torch.bfloat16))
    arguments = [q, k, v, None, 0.125, False, 0, 0.0, None]
    ops.attention(*arguments)
    with torch.npu.device(1), recording() as inside:
        ops.attention(*arguments)
    with torch.npu.device(0), recording() as outside:
        ops.attention(*arguments)
    assert [x.stream for x in inside.launches] == [x.stream for x in outside.launches] != []


# The first causal call on a device is one that is captured; its kind is known from another device.
CAPTURED_FIRST = """
import json, torch, torch_npu
from liteboost_adaptor import native_npu
native_npu.load()
states = [torch.randn(1, heads, 5, 64).bfloat16() for heads in (4, 2, 2)]
attention = torch.ops.liteboost.attention
rest = (None, 0.125, True, 0, 0.0, None)
with torch.no_grad():
    expected = torch.ops.liteboost_reference.attention(*(x.double() for x in states), *rest)
    attention(*(x.npu() for x in states), *rest)
    torch.npu.set_device(1)
    on_npu = [x.npu() for x in states]
    torch.npu.synchronize()
    torch.ops.liteboost._npu_forget_counts()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        captured = attention(*on_npu, *rest)
    after = attention(*on_npu, *rest)
    graph.replay()
    torch.npu.synchronize()
errors = [(x.cpu() - expected).abs().max().item() for x in (captured, after)]
print(json.dumps([errors, native_npu.calls()]))
"""


def test_a_causal_mask_is_not_made_while_a_graph_is_captured() -> None:
    errors, calls = json.loads(output(CAPTURED_FIRST)[-1])
    assert max(errors) <= TOLERANCE[torch.bfloat16]
    reason = "no causal mask can be made while a graph is captured"
    assert calls == [["attention", "", 1], ["attention", reason, 1]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"softcap": 5.0}, "a softcap"),
        ({"mask": torch.zeros(2, 1, 5, 5)}, "a float mask of another dtype than the queries"),
        ({"mask": torch.ones(2, 4, 5, 5, dtype=torch.bool)}, "a mask for each head"),
        ({"head_dim": 24}, "a head size that is no multiple of 16"),
    ],
)
def test_what_the_operator_does_not_serve_runs_as_the_reference_and_is_counted(
    change: dict[str, Any], reason: str
) -> None:
    q, k, v = states(5, 5, torch.bfloat16, change.get("head_dim", 64))
    arguments = [
        q,
        k,
        v,
        change.get("mask"),
        0.125,
        False,
        0,
        change.get("softcap", 0.0),
        change.get("sinks"),
    ]
    check(arguments, True)
    assert native_npu.calls() == [("attention", reason, 1)]
