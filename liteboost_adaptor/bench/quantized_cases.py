"""Quantized layers, saved and in tiles, beside torch's linear with the same weights dequantized."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.quantized_linear import dequantize_w4, dequantize_w8, scales_to_tiles, to_tiles
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


def linear_w8(rows: int, dtype: torch.dtype, name: str = "linear_w8") -> Iterator[Case]:
    """Integers of 8 bits with a scale for each output."""
    for label, (n, k) in _shapes(rows):
        weight = torch.randint(-127, 128, (n, k), dtype=torch.int8)
        layer = weight, torch.rand(n) * k**-0.5 / 127
        yield _of(name, label, rows, dtype, layer, dequantize_w8(*layer, dtype=dtype))


def linear_w8a8(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    """The same, with rows of x rounded to 8 bits."""
    yield from linear_w8(rows, dtype, "linear_w8a8")


def linear_w4(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    """Integers of 4 bits, groups of 32."""
    for label, (n, k) in _shapes(rows):
        weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
        layer = weight, (torch.rand(n, k // GROUP) * k**-0.5 / 8).bfloat16()
        yield _of("linear_w4", label, rows, dtype, layer, dequantize_w4(*layer, dtype=dtype))


def linear_tiles(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    """Both, in tiles."""
    for label, (n, k) in _shapes(rows):
        weight = torch.randint(-127, 128, (n, k), dtype=torch.int8)
        scales = torch.rand(n) * k**-0.5 / 127
        plain = dequantize_w8(weight, scales, dtype=dtype)
        tiles = to_tiles(weight), scales_to_tiles(scales)
        yield _of("linear_tiles", f"8 bits, {label}", rows, dtype, tiles, plain, None, None, n)
        weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
        scales = (torch.rand(n, k // GROUP) * k**-0.5 / 8).bfloat16()
        plain = dequantize_w4(weight, scales, dtype=dtype)
        tiles = to_tiles(weight), scales_to_tiles(scales)
        yield _of("linear_tiles", f"4 bits, {label}", rows, dtype, tiles, plain, None, None, n)


def experts_tiles(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    """Gate and up of some of many experts, in tiles, beside `experts_linear` with the same dequantized."""
    n, k, ops = 2 * EXPERT_INTERMEDIATE, EXPERT_HIDDEN, torch.ops.liteboost
    x, index = torch.randn(rows, k).to(dtype), torch.rand(rows, EXPERTS).topk(EXPERTS_A_TOKEN).indices
    used, local = index.unique(return_inverse=True)
    for bits in (8, 4):
        # The same for all experts: so many random numbers would take longer than the timing.
        if bits == 8:
            weight = torch.randint(-127, 128, (n, k), dtype=torch.int8)
            scales = torch.rand(n) * k**-0.5 / 127
            plain = dequantize_w8(weight, scales, dtype=dtype)
        else:
            weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
            scales = (torch.rand(n, k // GROUP) * k**-0.5 / 8).bfloat16()
            plain = dequantize_w4(weight, scales, dtype=dtype)
        one = to_tiles(weight), scales_to_tiles(scales)
        layer = [tensor.repeat(EXPERTS, 1, 1) for tensor in one]
        few = [tensor.repeat(len(used), 1, 1) for tensor in one]
        wide = plain.repeat(EXPERTS, 1, 1)
        yield Case(
            "experts_tiles",
            f"{bits} bits, {EXPERTS_A_TOKEN} of {EXPERTS} experts: [{rows}, {k}] x [{n}, {k}]",
            dtype,
            lambda layer=layer: ops.experts_tiles(x, *layer, None, None, index, n),
            lambda wide=wide: ops.experts_linear(x, wide, None, index),
            lambda few=few: exact_of("experts_tiles", x, *few, None, None, local, n),
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
