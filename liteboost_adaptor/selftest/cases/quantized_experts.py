"""Cases of experts with integer weights: some without a token, slots without an expert."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...ops.quantized_linear import pack_w4, prepack, prepack_scales
from ..case import Case, Kind, makes_cases
from .experts import SIZES

#: Zero points in several groups are read by no operator of an NPU.
LAYOUTS = ("8 bits", "4 bits", "4 bits in one group", "4 bits with zero points in one group")


@makes_cases(
    "experts_packed",
    *(f"{layout}{beside}".strip() for layout in ("", *LAYOUTS) for beside in ("", " bias")),
)
def experts_packed(kind: Kind) -> Iterator[Case]:
    layout = kind.layout.removesuffix("bias").rstrip()
    for tokens, slots, experts, inputs, outputs in SIZES:
        rows, groups = experts * outputs, 1 if layout.endswith("one group") else inputs // 32
        arguments = {"x": kind.normal(tokens, inputs), "index": kind.integers(experts + 1, tokens, slots)}
        arguments |= {
            "out_features": outputs,
            "bias": kind.normal(experts, outputs) if "bias" in kind.words else None,
        }
        label = f"{tokens} x {slots} of {experts}, [{outputs}, {inputs}]"
        weight = (kind.integers(255, rows, inputs) - 127).to(torch.int8)
        scales = (kind.normal(rows).abs() + 0.1) * inputs**-0.5 / 127
        layer = {"tiles": prepack(weight), "scales": prepack_scales(scales), "zero_points": None}
        if layout in ("", "8 bits"):
            yield Case(f"{label}, 8 bits", arguments | layer)
        weight = pack_w4(kind.integers(16, rows, inputs).to(torch.uint8))
        scales = (kind.normal(rows, groups).abs() + 0.1) * inputs**-0.5 / 8
        zeros = kind.integers(16, rows, groups).to(torch.uint8)
        layer = {"tiles": prepack(weight), "scales": prepack_scales(scales)}
        if layout != "8 bits":
            layer["zero_points"] = prepack_scales(zeros) if not layout or "zero" in layout else None
            yield Case(f"{label}, {layout or '4 bits'}", arguments | layer)
