"""The gated delta rule on the NPU: prompts as an aclnn operator where CANN has it, else as the reference."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from cann_sim.trace import recording
from npu.launching import simulated
from support import npu_ops

PROGRAM = Path(__file__).with_name("delta_rule_calls.py")
SERVED = ("a prompt", "a long prompt", "no state", "transposed", "g in bf16")
REFUSED = {
    "normalized": "normalized keys, which would be rounded to bf16",
    "fp32": "not bf16",
    "fp16": "not bf16",
    "a fast decay": "a decay beyond -1 <= g <= 0",
    "wide heads": "heads of more than 128",
    "many heads": "more than 64 heads",
    "beta in fp32": "beta in fp32",
    "no tokens": "no elements",
}


@functools.cache
def outcomes(*options: str) -> dict[str, dict[str, Any]]:
    """What `delta_rule_calls.py` prints on a simulator with these options."""
    with tempfile.TemporaryDirectory() as cache:
        return json.loads(simulated(*options, PROGRAM, XDG_CACHE_HOME=cache)[-1])


@pytest.mark.parametrize("soc", ["910B", "910C"])
@pytest.mark.parametrize("label", SERVED)
def test_prompts_are_one_operator(label: str, soc: str) -> None:
    found = outcomes("--release", "9.2.0", "--soc", soc)[label]
    assert found["reasons"] == [] and found["launches"].count("ChunkGatedDeltaRule") == 1
    assert found["contiguous"]
    for error, own in zip(found["errors"], found["reference"], strict=True):
        assert error <= 1.5 * own + 1e-6


@pytest.mark.parametrize("label", REFUSED)
def test_what_the_operator_is_not_documented_for(label: str) -> None:
    found = outcomes("--release", "9.2.0", "--soc", "910B")[label]
    assert found["reasons"] == [REFUSED[label]] and "ChunkGatedDeltaRule" not in found["launches"]
    for error, own in zip(found["errors"], found["reference"], strict=True):
        assert error <= 1.5 * own + 1e-6


def test_states_in_fp32_are_beyond_the_operator_of_9_1() -> None:
    found = outcomes("--release", "9.1.0")
    for label in SERVED:
        (reason,) = found[label]["reasons"]
        assert "initialState is Float; supported here: BFloat16" in reason
        for error, own in zip(found[label]["errors"], found[label]["reference"], strict=True):
            assert error <= 1.5 * own + 1e-6


@pytest.mark.parametrize(
    ("options", "reason"), [(("--release", "8.5.0"), "not in this CANN"), (("--soc", "310P"), "on a 310P")]
)
def test_where_there_is_no_operator(options: tuple[str, ...], reason: str) -> None:
    found = outcomes(*options)
    for label in ("a prompt", "no state"):
        assert found[label]["reasons"] == [reason]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 3])
def test_steps_keep_their_state_in_fp32(tokens: int, dtype: torch.dtype) -> None:
    """CANN's operator would round it at every token; one token is served by others."""
    torch.manual_seed(0)
    query, key = (torch.randn(2, tokens, 1, 16).to(dtype) for _ in range(2))
    form = {"g": -torch.rand(2, tokens, 2), "beta": torch.rand(2, tokens, 2).to(dtype)}
    state = torch.randn(2, 2, 16, 8)
    value = torch.randn(2, tokens, 2, 8).to(dtype)
    form = {
        "query": query,
        "key": key,
        "value": value,
        **form,
        "state": state,
        "scaling": 0.25,
        "normalize": True,
    }
    found = npu_ops.run("recurrent_gated_delta_rule", **form)
    assert found.reasons == ([] if tokens == 1 else ["several tokens"])
    exact_state = state.double()
    doubled = {k: v.double() if torch.is_tensor(v) else v for k, v in form.items()} | {"state": exact_state}
    exact = npu_ops.ops()["recurrent_gated_delta_rule"].reference(**doubled)
    out, after = found.results
    assert out.dtype == dtype and after.dtype == torch.float32
    assert (out.double() - exact).norm() <= torch.finfo(dtype).eps * exact.norm()
    assert (after.double() - exact_state).norm() <= 1e-5 * exact_state.norm()


@pytest.mark.parametrize(("k_heads", "v_heads"), [(1, 1), (2, 6)])
@pytest.mark.parametrize("is_one_row", [True, False], ids=["parts of a row", "apart"])
def test_a_token_of_any_layout(k_heads: int, v_heads: int, is_one_row: bool) -> None:
    """Parts of one row are read where they lie: a launch less. A state may be a view."""
    torch.manual_seed(0)
    rows, k_dim, v_dim = 3, 32, 16
    widths = [k_heads * k_dim, k_heads * k_dim, v_heads * v_dim]
    row = torch.randn(rows, 1, sum(widths)).bfloat16().npu()
    parts = [part if is_one_row else part.clone() for part in row.split(widths, -1)]
    given = [part.unflatten(-1, (-1, dim)) for part, dim in zip(parts, (k_dim, k_dim, v_dim), strict=True)]
    given += [-torch.rand(rows, 1, v_heads).npu(), torch.rand(rows, 1, v_heads).bfloat16().npu()]
    state = torch.randn(rows, v_heads, v_dim, k_dim).npu().transpose(2, 3)
    exact_state = state.cpu().double()
    form = {"scaling": 0.3, "normalize": True}
    reference = npu_ops.ops()["recurrent_gated_delta_rule"].reference
    exact = reference(*(each.cpu().double() for each in given), exact_state, **form)
    torch.ops.liteboost.recurrent_gated_delta_rule(*given, state.clone(), **form)  # compared at its first use
    with recording() as trace:
        out = torch.ops.liteboost.recurrent_gated_delta_rule(*given, state, **form)
    assert len(trace.ops) == 10 + (not is_one_row), trace.ops
    assert (out.cpu().double() - exact).norm() <= torch.finfo(torch.bfloat16).eps * exact.norm()
    assert (state.cpu().double() - exact_state).norm() <= 1e-5 * exact_state.norm()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"normalize": False}, "keys that are not normalized"),
        ({"scaling": 0.0}, "a scaling that is not above 0"),
    ],
    ids=str,
)
def test_tokens_that_are_computed_as_the_reference(changed: dict[str, Any], reason: str) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, 2, 16) for _ in range(3))
    form = {"query": query, "key": key, "value": value, "g": -torch.rand(1, 1, 2)}
    form |= {
        "beta": torch.rand(1, 1, 2),
        "state": torch.randn(1, 2, 16, 16),
        "scaling": 0.25,
        "normalize": True,
        **changed,
    }
    found = npu_ops.run("recurrent_gated_delta_rule", **form)
    assert found.reasons == [reason]
    exact = npu_ops.ops()["recurrent_gated_delta_rule"].reference(**form)
    torch.testing.assert_close(found.results[0], exact, atol=1e-5, rtol=1e-5)


def short_state(rows: int, v_heads: int, k_dim: int, v_dim: int) -> torch.Tensor:
    """A state in bf16 as layers keep it: ``[v_dim, k_dim]`` in memory."""
    return torch.randn(rows, v_heads, v_dim, k_dim).bfloat16().transpose(2, 3)


def token(rows: int, k_heads: int, v_heads: int, k_dim: int, v_dim: int) -> dict[str, Any]:
    row = torch.randn(rows, 1, 2 * k_heads * k_dim + v_heads * v_dim).bfloat16()
    parts = row.split([k_heads * k_dim, k_heads * k_dim, v_heads * v_dim], -1)
    names = ("query", "key", "value")
    form = {
        name: part.unflatten(-1, (-1, dim))
        for name, part, dim in zip(names, parts, (k_dim, k_dim, v_dim), strict=True)
    }
    return form | {
        "g": -torch.rand(rows, 1, v_heads),
        "beta": torch.rand(rows, 1, v_heads).bfloat16(),
        "scaling": k_dim**-0.5,
        "normalize": True,
    }


@pytest.mark.parametrize("sizes", [(1, 1, 1, 64, 64), (3, 2, 6, 32, 16)], ids=str)
def test_a_token_with_a_state_in_bf16_is_a_norm_and_one_operator(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    rows, _, v_heads, k_dim, v_dim = sizes
    form, state = token(*sizes), short_state(rows, v_heads, k_dim, v_dim)
    exact_state = state.double()
    doubled = {name: each.double() if torch.is_tensor(each) else each for name, each in form.items()}
    exact = npu_ops.ops()["recurrent_gated_delta_rule"].reference(**doubled, state=exact_state)
    found = npu_ops.run("recurrent_gated_delta_rule", **form, state=state)
    assert found.reasons == [] and found.launches == ["RmsNorm", "RecurrentGatedDeltaRule"]
    eps, (out, after) = torch.finfo(torch.bfloat16).eps, found.results
    assert (out.double() - exact).norm() <= 2 * eps * exact.norm()
    assert after.dtype == torch.bfloat16
    assert (after.double() - exact_state).norm() <= eps * exact_state.norm()


def test_states_in_bf16_that_are_computed_as_the_reference() -> None:
    torch.manual_seed(0)
    form, state = token(2, 1, 2, 16, 8), short_state(2, 2, 16, 8)
    long = {
        name: each.repeat(1, 3, *[1] * (each.dim() - 2))
        for name, each in form.items()
        if torch.is_tensor(each)
    }
    half = {name: each.half() for name, each in form.items() if torch.is_tensor(each)}
    for changed, reason in (
        ({"state": state.contiguous()}, "a state in bf16 that does not lie as the operator's"),
        ({"state": state, **long}, "several tokens"),
        ({"state": state, **half}, "a state in bf16 beside another dtype"),
        ({"state": state, "normalize": False}, "keys that are not normalized"),
    ):
        call = {**form, **changed}
        after = call["state"].clone()
        exact = npu_ops.ops()["recurrent_gated_delta_rule"].reference(**{**call, "state": after})
        found = npu_ops.run("recurrent_gated_delta_rule", **call)
        assert found.reasons == [reason]
        torch.testing.assert_close(found.results[0], exact, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(found.results[1], after, atol=2e-2, rtol=2e-2)
