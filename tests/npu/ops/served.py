"""A program that calls each op once on the NPU and prints why it was not served, as JSON.

python -m cann_sim run --soc 310P tests/npu/ops/served.py
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from liteboost_adaptor import native_npu
from liteboost_adaptor.ops import ops
from liteboost_adaptor.ops.quantized_linear import prepack, prepack_scales
from liteboost_adaptor.selftest.compare import placed


def calls(dtype: torch.dtype) -> dict[str, tuple[str, dict[str, Any]]]:
    """Label -> op and arguments, at sizes that every SoC takes unless the label says otherwise."""

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size).to(dtype)

    x, weight, ones = normal(2, 3, 64), normal(32, 64), torch.ones(64).to(dtype)
    q, k, table = normal(1, 3, 4, 64), normal(1, 3, 2, 64), normal(1, 3, 64)
    rope = {"q": q, "k": k, "cos": table, "sin": table, "unsqueeze_dim": 2}
    gated = {"x": x, "gate_weight": weight, "gate_bias": None, "up_weight": weight, "up_bias": None}
    index = torch.tensor([[0, 2], [1, 0], [2, 3]])
    keys, values = normal(2, 4, 2, 64).transpose(1, 2), normal(2, 4, 2, 32).transpose(1, 2)
    append = {"keys": keys, "values": values, "key": normal(1, 2, 3, 64), "value": normal(1, 2, 3, 32)}
    append["slots"] = torch.tensor([[5, 0, 3]])
    integers = {
        "weight": torch.randint(-127, 128, (32, 64), dtype=torch.int8),
        "scales": torch.rand(32) * 0.01,
    }
    # Operators on integers take 16-bit activations only.
    tiles = {"tiles": prepack(integers["weight"]), "scales": prepack_scales(integers["scales"])}
    tiles |= {"zero_points": None, "bias": None, "out_features": 32}
    beside_16_bits = {
        "linear_w8a8": ("linear_w8a8", {"x": x, **integers, "bias": ones[:32]}),
        "linear_w8a16": ("linear_packed", {"x": x, **tiles}),
    }
    states = {name: normal(1, 2, 5, 64) for name in ("key", "value")} | {"mask": None, "is_causal": True}
    query = normal(1, 5, 4, 64).transpose(1, 2)
    # On others it has tests of its own.
    attention = {
        "attention": ("attention", {"query": query[:, :, -1:], **states, "scaling": 0.125}),
        "attention of a prompt": ("attention", {"query": query, **states, "scaling": 0.125}),
    }
    is_310p = torch.ops.liteboost._npu_soc().startswith("Ascend310P")
    beside = (beside_16_bits if dtype != torch.float32 else {}) | (attention if is_310p else {})
    return beside | {
        "rms_norm": ("rms_norm", {"x": x, "weight": ones, "eps": 1e-6}),
        "gemma's norm": ("rms_norm", {"x": x, "weight": ones, "eps": 1e-6, "weight_offset": 1.0}),
        "short rows": ("rms_norm", {"x": x[..., :4], "weight": ones[:4], "eps": 1e-6}),
        "add_rms_norm": ("add_rms_norm", {"x": x, "residual": x, "weight": ones, "eps": 1e-6}),
        "inverse_rms": ("inverse_rms", {"x": x, "eps": 1e-6}),
        "gated_rms_norm": ("gated_rms_norm", {"x": x, "gate": x, "weight": ones, "eps": 1e-6}),
        "short groups": (
            "gated_rms_norm",
            {"x": x, "gate": x, "weight": ones, "eps": 1e-6, "gate_first": True, "group_size": 4},
        ),
        "layer_norm": ("layer_norm", {"x": x, "weight": ones, "bias": ones, "eps": 1e-6}),
        "rope": ("rope", rope),
        "pairs": ("rope", {**rope, "layout": "interleaved"}),
        "activation": ("activation", {"x": x, "activation": "silu"}),
        "gated_activation": ("gated_activation", {"gate": x, "up": x}),
        "gelu": ("gated_activation", {"gate": x, "up": x, "activation": "gelu_tanh"}),
        "relu": ("gated_activation", {"gate": x, "up": x, "activation": "relu"}),
        "clipped": ("gated_activation", {"gate": x, "up": x, "limit": 1.0, "up_offset": 1.0}),
        "odd rows": ("gated_activation", {"gate": x[..., :20], "up": x[..., :20]}),
        "linear": ("linear", {"x": x, "weight": weight}),
        "bias": ("linear", {"x": x, "weight": weight, "bias": ones[:32]}),
        "gated_linear": ("gated_linear", gated),
        "experts_linear": (
            "experts_linear",
            {"x": x[0], "weight": normal(3, 8, 64), "bias": None, "index": index},
        ),
        "kv_append": ("kv_append", append),
        "experts_combine": ("experts_combine", {"y": normal(3, 2, 64), "scores": normal(3, 2)}),
    }


def double(value: Any) -> Any:
    return value.double() if torch.is_tensor(value) and value.is_floating_point() else value


def outcome(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The reasons counted in one call, and the largest error over the largest value; or a fault."""
    torch.ops.liteboost._npu_forget_counts()
    try:
        given = placed(arguments, "npu")
        found = ops()[name].outputs(getattr(torch.ops.liteboost, name)(**given), given)[0]
    except RuntimeError as fault:  # no bf16 on a 310P: not in what the reference is made of either
        return {"reasons": _reasons(), "fault": str(fault)}
    doubled = {k: double(v) for k, v in arguments.items()}
    exact = ops()[name].outputs(ops()[name].reference(**doubled), doubled)[0]
    error = ((found.cpu().double() - exact).abs().max() / exact.abs().max()).item()
    return {"reasons": _reasons(), "error": error}


def _reasons() -> list[str]:
    return [why for _, why, _ in native_npu.calls() if why]


def main() -> None:
    torch.manual_seed(0)
    assert native_npu.load().loaded
    with torch.no_grad():
        found = {
            str(dtype).removeprefix("torch."): {label: outcome(*call) for label, call in calls(dtype).items()}
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
