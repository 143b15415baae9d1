"""Cases of linear layers with integer weights: one row, as decoding has it, and more."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...ops.quantized_linear import pack_w4, scales_to_tiles, to_tiles
from ..case import Case, Kind, makes_cases

#: (rows, in_features, out_features)
SIZES = ((1, 64, 96), (1, 1024, 256), (7, 128, 64), (64, 256, 96))


@makes_cases("linear_w8")
def linear_w8(kind: Kind) -> Iterator[Case]:
    for rows, inputs, outputs in SIZES:
        arguments = {
            "x": kind.normal(1, rows, inputs),
            "weight": (kind.integers(255, outputs, inputs) - 127).to(torch.int8),
            "scales": (kind.normal(outputs).abs() + 0.1) * inputs**-0.5 / 127,
        }
        label = f"[{rows}, {inputs}] x [{outputs}, {inputs}]"
        yield Case(label, arguments)
        yield Case(f"{label} + bias", {**arguments, "bias": kind.normal(outputs)})


@makes_cases("linear_w4")
def linear_w4(kind: Kind) -> Iterator[Case]:
    for (rows, inputs, outputs), group in zip(SIZES, (32, 32, 64, 128), strict=True):
        groups = inputs // group
        arguments = {
            "x": kind.normal(1, rows, inputs),
            "weight": pack_w4(kind.integers(16, outputs, inputs).to(torch.uint8)),
            "scales": (kind.normal(outputs, groups).abs() + 0.1) * inputs**-0.5 / 8,
        }
        label = f"[{rows}, {inputs}] x [{outputs}, {inputs}], groups of {group}"
        yield Case(label, arguments)
        zeros = kind.integers(16, outputs, groups).to(torch.uint8)
        yield Case(f"{label}, zero points", {**arguments, "zero_points": zeros, "bias": kind.normal(outputs)})


@makes_cases("linear_tiles")
def linear_tiles(kind: Kind) -> Iterator[Case]:
    for cases in (linear_w8(kind), linear_w4(kind)):
        for case in cases:
            given = case.arguments
            zeros = given.get("zero_points")
            arguments = {
                "x": given["x"],
                "tiles": to_tiles(given["weight"]),
                "scales": scales_to_tiles(given["scales"]),
                "zero_points": None if zeros is None else scales_to_tiles(zeros),
                "bias": given.get("bias"),
                "out_features": len(given["weight"]),
            }
            yield Case(case.label, arguments)
