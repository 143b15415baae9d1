"""What runs on the SoC simulated: attention, quantized layers, Gemma's norm, a Llama at level 2; as JSON.

python -m cann_sim run --soc 310P tests/npu/socs_program.py float16
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from cann_sim.trace import Trace, recording
from support import llamas
from support.attention_cases import double

import liteboost_adaptor
from liteboost_adaptor import native_npu
from liteboost_adaptor.selftest.compare import compare

ops = torch.ops.liteboost
#: Label -> batch, heads, key heads, queries, keys, head size, and what is given beside.
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "one": ((2, 4, 2, 1, 9, 64), {}),
    "one, a window": ((2, 4, 2, 1, 40, 64), {"window": 7}),
    "one, as many key heads": ((3, 2, 2, 1, 9, 192), {}),
    "one, wide heads": ((1, 4, 2, 1, 9, 192), {}),
    "one, a mask": ((2, 4, 2, 1, 9, 64), {"mask": True}),
    "prompt": ((2, 4, 2, 9, 9, 64), {}),
    "prompt of blocks": ((2, 4, 1, 64, 64, 64), {}),
    "full": ((2, 4, 4, 9, 21, 64), {"causal": False}),
    "prompt, a mask": ((2, 4, 2, 9, 9, 64), {"mask": True}),
    "prompt, a window": ((2, 4, 2, 40, 40, 64), {"window": 7}),
    "behind keys": ((2, 4, 2, 5, 21, 64), {}),
    "bias": ((2, 4, 2, 9, 9, 64), {"bias": True}),
    "sinks": ((2, 4, 2, 1, 9, 64), {"sinks": True}),
    "a softcap": ((2, 4, 2, 1, 9, 64), {"softcap": 5.0}),
}
#: Op and the end of the kind by whose cases it is compared, behind the dtype.
QUANTIZED = (
    ("linear_packed", " 4 bits"),
    ("linear_packed", " 8 bits bias"),
    ("linear_w8a8", ""),
    ("int8_attention", " decode cache head-64"),
    ("experts_packed", " 8 bits"),
)
#: Label -> op, and what it adds to the weight. Recorded steps norm a sum by a ``1 + weight`` made before it.
NORMS = {
    "offset": ("rms_norm", 1.0),
    "sum, offset": ("add_rms_norm", 1.0),
    "sum, as recorded": ("add_rms_norm", 0.0),
}
#: Positions of the cache behind those that count.
SPARE = 6


def arguments(size: tuple[int, ...], beside: dict[str, Any], dtype: torch.dtype) -> list[Any]:
    batch, heads, kv_heads, queries, keys, head = size
    mask = None
    if "mask" in beside:  # the last row of the first sequence sees nothing
        mask = torch.rand(batch, 1, queries, keys) > 0.3
        mask[0, :, -1] = False
    if "bias" in beside:
        mask = torch.randn(batch, 1, queries, keys).to(dtype)
    query = torch.randn(batch, queries, heads, head).to(dtype).transpose(1, 2)
    key, value = (torch.randn(batch, kv_heads, keys + SPARE, head).to(dtype) for _ in range(2))
    key[:, :, keys:], value[:, :, keys:] = torch.nan, torch.nan
    sinks = torch.randn(heads).to(dtype) if "sinks" in beside else None
    causal = mask is None and beside.get("causal", True)
    rest = (mask, head**-0.5, causal, beside.get("window", 0), beside.get("softcap", 0.0), sinks)
    return [query, key[:, :, :keys], value[:, :, :keys], *rest]


def on_npu(value: Any) -> Any:
    """Keys and values stay the front of a cache."""
    if not torch.is_tensor(value):
        return value
    whole = value if value._base is None or value.dim() != 4 else value._base
    if whole is value or whole.dim() != 4:
        return value.npu()
    return whole.npu()[:, :, : value.shape[2]] if whole.shape[1] == value.shape[1] else value.npu()


def attention(size: tuple[int, ...], beside: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The error relative to the largest value, the reasons counted, and the attention operators launched."""
    given = arguments(size, beside, dtype)
    exact = torch.ops.liteboost_reference.attention(*map(double, given))
    placed = [on_npu(value) for value in given]
    ops.attention(*placed)  # compares
    ops._npu_forget_counts()
    with recording() as trace:
        found = ops.attention(*placed)
    error = (found.cpu().double() - exact).abs().max() / exact.abs().max()
    return {"error": error.item(), "reasons": reasons(), "operators": attentions(trace)}


def quantized(op: str, kind: str) -> dict[str, Any]:
    """What speaks against the op, and the operators for integers that it launched."""
    with recording() as trace:
        against = compare(op, kind, "npu").reason
    launched = {name for name in names(trace) if "Quant" in name or "FusedInfer" in name}
    return {"against": against, "operators": sorted(launched)}


def norm(op: str, offset: float, dtype: torch.dtype) -> dict[str, Any]:
    """The error relative to the largest value, the reasons counted, and the norm operators launched."""
    rows = [torch.randn(3, 128).to(dtype) for _ in range(2 if op == "add_rms_norm" else 1)]
    given = [*rows, torch.rand(128).to(dtype), 1e-6, offset, True]
    exact = first(getattr(torch.ops.liteboost_reference, op)(*map(double, given)))
    placed = [on_npu(value) for value in given]
    getattr(ops, op)(*placed)  # compares
    ops._npu_forget_counts()
    with recording() as trace:
        found = first(getattr(ops, op)(*placed))
    error = (found.cpu().double() - exact).abs().max() / exact.abs().max()
    launched = sorted({name for name in names(trace) if "Norm" in name})
    return {"error": error.item(), "reasons": reasons(), "operators": launched}


def first(results: Any) -> torch.Tensor:
    """The norm, without the sum."""
    return results if torch.is_tensor(results) else results[0]


def attentions(trace: Trace) -> list[str]:
    return sorted({name for name in names(trace) if "Attention" in name})


def names(trace: Trace) -> list[str]:
    return [launch.op for launch in trace.launches]


def reasons() -> list[str]:
    return sorted({f"{op}: {why}" for op, why, _ in native_npu.calls() if why})


def llama(dtype: torch.dtype) -> dict[str, Any]:
    """Tokens at levels 0 and 2, and at level 2 what a token launches and what was not served."""
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    sizes |= {"intermediate_size": 128, "num_hidden_layers": 2, "pad_token_id": 0}
    found: dict[str, Any] = {}
    for level in (0, 2):
        liteboost_adaptor.undo()
        liteboost_adaptor.apply(level=level)
        model = llamas.llama(dtype, factor=8, **sizes)
        ids = torch.randint(3, 128, (2, 11), generator=torch.Generator().manual_seed(1))
        mask = torch.ones_like(ids)
        mask[0, :3], ids[0, :3] = 0, 0
        inputs = {"input_ids": ids.npu(), "attention_mask": mask.npu()}
        with recording() as trace:
            out = model.generate(**inputs, do_sample=False, max_new_tokens=24, eos_token_id=None)
        found[f"tokens {level}"] = out.cpu().tolist()
    return found | {"operators": attentions(trace), "reasons": reasons()}


def main() -> None:
    dtype = getattr(torch, sys.argv[1])
    torch.manual_seed(0)
    assert native_npu.load().loaded
    with torch.no_grad():
        found = {label: attention(*case, dtype) for label, case in CASES.items()}
        name = {"bfloat16": "bf16", "float16": "fp16"}[sys.argv[1]]
        integers = {f"{op}{kind}": quantized(op, name + kind) for op, kind in QUANTIZED}
        norms = {label: norm(*case, dtype) for label, case in NORMS.items()}
    ops._npu_forget_counts()
    result = {"attention": found, "quantized": integers, "norms": norms, "llama": llama(dtype)}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
