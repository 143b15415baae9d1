"""Calls that aclnn operators do not take, by SoC and CANN: the reference runs, is right, and is counted."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from npu.launching import simulated

PROGRAM = Path(__file__).with_name("served.py")
ALLOWED = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}
PRODUCTS_ON_310P = ["fp32 on a 310P, which multiplies in fp16"], ["not fp16 on a 310P"]
MISSING = ["not in this CANN"]


@functools.cache
def served(*options: str, queue: str = "0") -> dict[str, Any]:
    """What `served.py` prints on a simulator with these options; every result must be right."""
    with tempfile.TemporaryDirectory() as cache:
        lines = simulated(*options, PROGRAM, XDG_CACHE_HOME=cache, TASK_QUEUE_ENABLE=queue)
    found = json.loads(lines[-1])
    for dtype, calls in found.items():
        for label, outcome in calls.items():
            # Torch's own product rounds fp32 to fp16 there.
            allowed = ALLOWED["float16" if outcome["reasons"] in PRODUCTS_ON_310P else dtype]
            assert outcome.get("error", 0.0) <= allowed and (
                "fault" not in outcome or "BFloat16" in outcome["fault"]
            ), (
                label,
                outcome,
            )
    return found


def reasons(found: dict[str, Any], dtype: str) -> dict[str, list[str]]:
    return {label: outcome["reasons"] for label, outcome in found[dtype].items() if outcome["reasons"]}


@pytest.mark.parametrize("dtype", ALLOWED)
def test_a_910b_serves_everything(dtype: str) -> None:
    assert reasons(served("--soc", "910B"), dtype) == {}


def test_a_310p_serves_fp16() -> None:
    assert reasons(served("--soc", "310P"), "float16") == {
        "gemma's norm": ["Gemma's norm on a 310P"],
        "short rows": ["rows below 32 bytes on a 310P"],
        "short groups": ["rows below 32 bytes on a 310P"],
        "layer_norm": ["LayerNorm on a 310P"],
        "pairs": ["interleaved on a 310P"],
        "kv_append": ["on a 310P"],
        "clipped": ["a limit, slope or offset on a 310P"],
        "odd rows": ["rows of no multiple of 64 bytes on a 310P"],
        "linear_w8a8": ["8-bit activations on a 310P"],
    }


def test_a_310p_multiplies_in_fp16_only_and_has_no_bf16() -> None:
    found = served("--soc", "310P")
    assert set(reasons(found, "bfloat16")) == set(found["bfloat16"])
    in_fp32 = reasons(found, "float32")
    for label in ("linear", "bias", "gated_linear"):
        assert in_fp32[label] == PRODUCTS_ON_310P[0]
    assert "rope" not in in_fp32 and "rms_norm" not in in_fp32 and "gated_activation" not in in_fp32


@pytest.mark.parametrize("dtype", ALLOWED)
def test_an_operator_that_this_cann_lacks(dtype: str) -> None:
    hidden = ("SwiGlu", "RotaryPositionEmbedding", "RmsNorm", "MoeInitRoutingV2")
    hidden += ("ScatterPaKvCache", "ScatterNdUpdate")
    found = reasons(served("--without", ",".join(f"aclnn{name}" for name in hidden)), dtype)
    labels = ("gated_activation", "odd rows", "gated_linear", "rope", "pairs", "rms_norm", "short rows")
    labels += ("inverse_rms", "gated_rms_norm", "short groups", "experts_linear", "kv_append")
    assert found == {label: MISSING for label in labels}


@pytest.mark.parametrize("queue", ["1", "2"])
def test_every_task_queue(queue: str) -> None:
    found = served("--soc", "910B", queue=queue)
    assert all(reasons(found, dtype) == {} for dtype in ALLOWED)


def test_an_older_release() -> None:
    found = reasons(served("--release", "8.1.RC1"), "bfloat16")
    assert found == {"clipped": MISSING}
