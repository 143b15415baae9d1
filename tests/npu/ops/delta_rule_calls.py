"""A program that runs the gated delta rule over prompts on the NPU and prints what became of it, as JSON.

python -m cann_sim run --release 9.1.0 tests/npu/ops/delta_rule_calls.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from cann_sim import trace

from liteboost_adaptor import native_npu
from liteboost_adaptor.ops import ops
from liteboost_adaptor.selftest.compare import placed

NAME = "chunk_gated_delta_rule"


def arguments(
    size: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, decay: float = 1.0, **changed: Any
) -> dict[str, Any]:
    """A call; ``size``: batch, tokens, k_heads, v_heads, k_dim, v_dim."""
    batch, tokens, k_heads, v_heads, k_dim, v_dim = size
    query, key = (torch.randn(batch, tokens, k_heads, k_dim).mul(k_dim**-0.5).to(dtype) for _ in range(2))
    form = {
        "query": query,
        "key": key,
        "value": torch.randn(batch, tokens, v_heads, v_dim).to(dtype),
        "g": -decay * torch.rand(batch, tokens, v_heads),
        "beta": torch.rand(batch, tokens, v_heads).to(dtype),
        "initial_state": torch.randn(batch, v_heads, k_dim, v_dim),
        "scaling": k_dim**-0.5,
    }
    return {**form, **changed}


def calls() -> Iterator[tuple[str, dict[str, Any]]]:
    """What is told apart."""
    plain = (2, 9, 2, 4, 16, 24)
    short = arguments(plain)
    yield "a prompt", short
    yield "normalized", {**short, "normalize": True}
    yield "a long prompt", arguments((1, 150, 1, 2, 32, 16))
    yield "no state", arguments(plain, initial_state=None)
    yield "transposed", {**short, "value": short["value"].transpose(1, 3).contiguous().transpose(1, 3)}
    yield "g in bf16", {**short, "g": short["g"].bfloat16()}
    yield "fp32", arguments(plain, torch.float32)
    yield "fp16", arguments(plain, torch.float16)
    yield "a fast decay", arguments(plain, decay=3.0)
    yield "wide heads", arguments((1, 3, 1, 1, 130, 16))
    yield "many heads", arguments((1, 3, 1, 65, 8, 8))
    yield "beta in fp32", {**short, "beta": short["beta"].float()}
    yield "no tokens", arguments((1, 0, 1, 1, 8, 8))


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.cpu().double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def outcome(form: dict[str, Any]) -> dict[str, Any]:
    """Reasons, launches, and how much further from float64 than the reference the op is."""
    reference, op = ops()[NAME].reference, getattr(torch.ops.liteboost, NAME)
    op(**placed(form, "npu"))  # compared at its first use
    torch.ops.liteboost._npu_forget_counts()
    there = placed(form, "npu")
    with trace.recording() as recorded:
        found = op(**there)
    exact = reference(**{k: v.double() if torch.is_tensor(v) else v for k, v in form.items()})
    plain = reference(**form)
    return {
        "reasons": [why for _, why, _ in native_npu.calls() if why],
        "launches": [launch.removeprefix("aclnn") for launch in recorded.ops],
        "contiguous": all(each.is_contiguous() for each in found),
        "errors": [relative(a, b) for a, b in zip(found, exact, strict=True)],
        "reference": [relative(a, b) for a, b in zip(plain, exact, strict=True)],
    }


def main() -> None:
    torch.manual_seed(0)
    assert native_npu.load().loaded
    with torch.no_grad():
        found = {label: outcome(form) for label, form in calls()}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
