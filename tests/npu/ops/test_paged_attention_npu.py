"""Paged attention as one aclnn operator: what it gives, of which pages, and what is left to the reference."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from cann_sim.releases import DEFAULT_RELEASE, RELEASES
from cann_sim.trace import recording
from support.attention_cases import double

from liteboost_adaptor import native_npu

ops = torch.ops.liteboost
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
MIXED = ((1, 33), (9, 9), (5, 37), (1, 16))
DECODE = ((1, 130), (1, 5))
#: From CANN 9.0 on the operator takes sinks in bf16 only.
IN_BF16 = RELEASES.index(os.environ.get("SIMCANN_VERSION", DEFAULT_RELEASE)) >= RELEASES.index("9.0.0")


def make(
    requests: tuple[tuple[int, int], ...],
    dtype: torch.dtype,
    rows: int = 16,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
) -> dict[str, Any]:
    """Pages in any order; without ``rows``, packed keys."""
    tokens, keys = (sum(lengths) for lengths in zip(*requests, strict=True))
    counts = [-(-k // rows) for _, k in requests] if rows else []
    pages, length = (sum(counts) + 2, rows) if rows else (1, keys)
    order, table = torch.randperm(pages), None
    if rows:
        table = torch.zeros(len(requests), max(counts), dtype=torch.int32)
        for request, count in enumerate(counts):
            first = sum(counts[:request])
            table[request, :count] = order[first : first + count]
    return {
        "query": torch.randn(tokens, heads[0], head_dim, dtype=dtype),
        "key": torch.randn(pages, length, heads[1], head_dim, dtype=dtype),
        "value": torch.randn(pages, length, heads[1], head_dim, dtype=dtype),
        "cu_seqlens_q": torch.tensor([0] + [q for q, _ in requests]).cumsum(0),
        "cu_seqlens_k": torch.tensor([0] + [k for _, k in requests]).cumsum(0),
        "block_table": table,
        "scaling": 0.125,
    }


def check(arguments: dict[str, Any], **options: Any) -> None:
    """The op on the NPU against the reference in float64, the lengths staying on the CPU."""
    arguments = arguments | options
    dtype = arguments["query"].dtype
    wide = {name: double(value) for name, value in arguments.items()}
    expected = torch.ops.liteboost_reference.paged_attention(**wide)
    on_npu = {
        name: value.npu() if isinstance(value, torch.Tensor) and not name.startswith("cu_") else value
        for name, value in arguments.items()
    }
    found = ops.paged_attention(**on_npu)
    assert found.is_contiguous() and found.dtype == dtype
    assert (found.cpu().double() - expected).abs().max() <= TOLERANCE.get(dtype, 1e-5)


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"is_causal": False},
    "window": {"sliding_window": 7},
    "sinks": {"sinks": True},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("rows", [0, 16, 128])
@pytest.mark.parametrize("requests", [MIXED, DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_pages_and_packed_keys(
    dtype: torch.dtype, requests: tuple[tuple[int, int], ...], rows: int, option: str
) -> None:
    options = dict(OPTIONS[option])
    if "sinks" in options:
        options["sinks"] = torch.randn(4).to(dtype)
    check(make(requests, dtype, rows), **options)  # at its first use the operator is compared
    ops._npu_forget_counts()
    with recording() as trace:
        check(make(requests, dtype, rows), **options)
    ((op, reason, calls),) = native_npu.calls()
    assert (op, calls) == ("paged_attention", 1)
    if "sinks" in options and dtype == torch.float16 and IN_BF16:
        assert "learnableSink is Half; supported here: BFloat16" in reason
        return
    assert reason == ""
    version = "V4" if option == "sinks" else "V3"
    launched = [name for name in trace.ops if "Attention" in name]
    assert launched == [f"aclnnFusedInferAttentionScore{version}"]


def test_a_refusal_of_a_verified_kind_is_counted_and_computed() -> None:
    """A window over heads of 256, as Gemma has them: CANN 8.5 has no tiling for it."""
    for head_dim in (64, 256):
        ops._npu_forget_counts()
        arguments = make(MIXED, torch.bfloat16, head_dim=head_dim)
        check(arguments, sliding_window=4)
        check(arguments, sliding_window=4)
        reasons = {reason for _, reason, _ in native_npu.calls()}
        if head_dim == 64 or IN_BF16:
            assert reasons == {""}
        else:
            assert all("layout TND with D 256, sparseMode 4" in reason for reason in reasons)


def test_lengths_and_tables_from_either_side() -> None:
    arguments = make(MIXED, torch.bfloat16)
    on_npu = {name: v.npu() if isinstance(v, torch.Tensor) else v for name, v in arguments.items()}
    mixed = {"block_table": arguments["block_table"], "cu_seqlens_q": arguments["cu_seqlens_q"].int()}
    expected = ops.paged_attention(**on_npu)
    assert torch.equal(ops.paged_attention(**on_npu | mixed), expected)
    with pytest.raises(ValueError, match="below the pages of key"):
        ops.paged_attention(**on_npu | {"block_table": arguments["block_table"] + 1000})


UNSERVED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({"dtype": torch.float32}, {}),
    "a softcap": ({}, {"softcap": 2.0}),
    "pages whose rows are no multiple of 16": ({"rows": 20}, {}),
    "pages of more than 128 rows": ({"rows": 256}, {}),
    "a head size that packed tokens do not have": ({"head_dim": 48, "heads": (2, 2)}, {}),
    "more queries than keys": ({"requests": ((5, 3),)}, {}),
    "a request without queries or keys": ({"requests": ((0, 3), (1, 4))}, {}),
}


@pytest.mark.parametrize("reason", UNSERVED)
def test_the_rest_is_the_references_and_counted(reason: str) -> None:
    sizes, options = UNSERVED[reason]
    check(make(**{"requests": MIXED, "dtype": torch.bfloat16} | sizes), **options)
    assert native_npu.calls() == [("paged_attention", reason, 1)]
