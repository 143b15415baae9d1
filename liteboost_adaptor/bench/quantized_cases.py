"""Quantized layers beside torch's linear with the same weights dequantized."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.quantized_linear import dequantize_w4, dequantize_w8, prepack, prepack_scales
from .op_case import (
    EXPERT_HIDDEN,
    EXPERT_INTERMEDIATE,
    EXPERTS,
    EXPERTS_A_TOKEN,
    HIDDEN,
    LAYER_WEIGHTS,
    WEIGHT_BYTES,
    Case,
    exact_of,
)

#: Columns that share a scale, of w4.
GROUP = 32


def _shapes(rows: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Of a layer; with many rows, those that read the hidden state."""
    for label, (n, k) in LAYER_WEIGHTS.items():
        if rows == 1 or k == HIDDEN:
            yield label, (n, k)


def linear_w8a8(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    """Integers of 8 bits with a scale for each output, by rows of x rounded to 8 bits."""
    for label, (n, k) in _shapes(rows):
        layer = _w8(n, k)
        yield _of("linear_w8a8", label, rows, dtype, layer, dequantize_w8(*layer, dtype=dtype))


def linear_packed(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    """Weights of 8 bits, and of 4 in groups of 32."""
    for label, (n, k) in _shapes(rows):
        for bits, make, dequantize in ((8, _w8, dequantize_w8), (4, _w4, dequantize_w4)):
            weight, scales = make(n, k)
            plain = dequantize(weight, scales, dtype=dtype)
            tiles = prepack(weight), prepack_scales(scales)
            yield _of("linear_packed", f"{bits} bits, {label}", rows, dtype, tiles, plain, None, None, n)


def linear_w4a8(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    """Weights of 4 bits in groups of 32, by rows of x rounded to 8 bits."""
    for label, (n, k) in _shapes(rows):
        weight, scales = _w4(n, k)
        plain = dequantize_w4(weight, scales, dtype=dtype)
        tiles = prepack(weight), prepack_scales(scales)
        yield _of("linear_w4a8", label, rows, dtype, tiles, plain, None, None, n)


def _w8(n: int, k: int) -> tuple[Tensor, Tensor]:
    return torch.randint(-127, 128, (n, k), dtype=torch.int8), torch.rand(n) * k**-0.5 / 127


def _w4(n: int, k: int) -> tuple[Tensor, Tensor]:
    weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    return weight, (torch.rand(n, k // GROUP) * k**-0.5 / 8).bfloat16()


def experts_packed(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    """Gate and up of some of many experts, in tiles, beside `experts_linear` with the same dequantized."""
    n, k, ops = 2 * EXPERT_INTERMEDIATE, EXPERT_HIDDEN, torch.ops.liteboost
    x, index = torch.randn(rows, k).to(dtype), torch.rand(rows, EXPERTS).topk(EXPERTS_A_TOKEN).indices
    used, local = index.unique(return_inverse=True)
    for bits, make, dequantize in ((8, _w8, dequantize_w8), (4, _w4, dequantize_w4)):
        # The same for all experts: so many random numbers would take longer than the timing.
        weight, scales = make(n, k)
        plain = dequantize(weight, scales, dtype=dtype)
        one = prepack(weight), prepack_scales(scales)
        layer = [tensor.repeat(EXPERTS, 1, 1) for tensor in one]
        few = [tensor.repeat(len(used), 1, 1) for tensor in one]
        wide = plain.repeat(EXPERTS, 1, 1)
        yield Case(
            "experts_packed",
            f"{bits} bits, {EXPERTS_A_TOKEN} of {EXPERTS} experts: [{rows}, {k}] x [{n}, {k}]",
            dtype,
            lambda layer=layer: ops.experts_packed(x, *layer, None, None, index, n),
            lambda wide=wide: ops.experts_linear(x, wide, None, index),
            lambda few=few: exact_of("experts_packed", x, *few, None, None, local, n),
        )


def _of(
    name: str,
    label: str,
    rows: int,
    dtype: torch.dtype,
    layer: tuple[Tensor, Tensor],
    plain: Tensor,
    *rest: int | None,
) -> Case:
    n, k = plain.shape
    x, op = torch.randn(1, rows, k).to(dtype), getattr(torch.ops.liteboost, name)
    # As a model takes its layers': none is in a cache when its turn comes.
    copies = max(2, WEIGHT_BYTES // plain.nbytes)
    turn = itertools.cycle([tuple(tensor.clone() for tensor in (plain, *layer)) for _ in range(copies)])
    return Case(
        name,
        f"{label}: [{rows}, {k}] x [{n}, {k}]",
        dtype,
        lambda: op(x, *next(turn)[1:], *rest),
        lambda: F.linear(x, next(turn)[0]),
        lambda: exact_of(name, x, *layer, *rest),
    )
