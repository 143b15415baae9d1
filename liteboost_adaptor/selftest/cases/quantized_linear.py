"""Cases of linear layers with integer weights: one row, as decoding has it, and more."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...ops.quantized_linear import pack_w4, prepack, prepack_scales
from ..case import Case, Kind, makes_cases

#: (rows, in_features, out_features)
SIZES = ((1, 64, 96), (1, 1024, 256), (7, 128, 64), (64, 256, 96))


@makes_cases("linear_packed", "8 bits", "8 bits bias", "4 bits", "4 bits bias")
def linear_packed(kind: Kind) -> Iterator[Case]:
    make = _of_8_bits if kind.layout.startswith("8 bits") else _of_4_bits
    yield from make(kind, has_bias=kind.layout.endswith("bias"))


@makes_cases("linear_w4a8", "", "bias")
def linear_w4a8(kind: Kind) -> Iterator[Case]:
    yield from _of_4_bits(kind, has_bias=kind.layout == "bias")


def _case(label: str, x: Tensor, weight: Tensor, scales: Tensor, **rest: Tensor) -> Case:
    """Of a weight and scales as they are saved."""
    zeros = rest.get("zero_points")
    arguments = {
        "x": x,
        "tiles": prepack(weight),
        "scales": prepack_scales(scales),
        "zero_points": None if zeros is None else prepack_scales(zeros),
        "bias": rest.get("bias"),
        "out_features": len(weight),
    }
    return Case(label, arguments)


def _bias(kind: Kind, size: int, has_bias: bool) -> dict[str, Tensor]:
    return {"bias": kind.normal(size)} if has_bias else {}


def _of_8_bits(kind: Kind, has_bias: bool) -> Iterator[Case]:
    for rows, inputs, outputs in SIZES:
        x, weight = kind.normal(1, rows, inputs), (kind.integers(255, outputs, inputs) - 127).to(torch.int8)
        scales = (kind.normal(outputs).abs() + 0.1) * inputs**-0.5 / 127
        label = f"[{rows}, {inputs}] x [{outputs}, {inputs}] of 8 bits"
        yield _case(label, x, weight, scales, **_bias(kind, outputs, has_bias))


def _of_4_bits(kind: Kind, has_bias: bool) -> Iterator[Case]:
    for (rows, inputs, outputs), group in zip(SIZES, (32, 32, 64, 128), strict=True):
        groups = inputs // group
        x, weight = kind.normal(1, rows, inputs), pack_w4(kind.integers(16, outputs, inputs).to(torch.uint8))
        scales = (kind.normal(outputs, groups).abs() + 0.1) * inputs**-0.5 / 8
        label = f"[{rows}, {inputs}] x [{outputs}, {inputs}] of 4 bits, groups of {group}"
        bias = _bias(kind, outputs, has_bias)
        yield _case(label, x, weight, scales, **bias)
        zeros = kind.integers(16, outputs, groups).to(torch.uint8)
        yield _case(f"{label}, zero points", x, weight, scales, zero_points=zeros, **bias)
