"""Cases of linear layers with integer weights and activations: one row, as decoding has it, and more."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..case import Case, Kind, makes_cases
from .quantized_linear import SIZES


@makes_cases("linear_w8a8", "", "bias")
def linear_w8a8(kind: Kind) -> Iterator[Case]:
    for rows, inputs, outputs in SIZES:
        arguments = {
            "x": kind.normal(1, rows, inputs),
            "weight": (kind.integers(255, outputs, inputs) - 127).to(torch.int8),
            "scales": (kind.normal(outputs).abs() + 0.1) * inputs**-0.5 / 127,
        }
        label = f"[{rows}, {inputs}] x [{outputs}, {inputs}]"
        bias = kind.normal(outputs)  # drawn in either case: the same rows with and without it
        yield Case(label, {**arguments, "bias": bias if "bias" in kind.words else None})
