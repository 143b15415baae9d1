"""Cases of attention over rows of integers: a prompt and one token, and how such rows are made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ...ops.int8_attention import quantize_kv as rows_of
from ..case import Case, Kind, makes_cases
from .attention import DECODE, SPARE, attention


@makes_cases("quantize_kv")
def quantize_kv(kind: Kind) -> Iterator[Case]:
    for batch, _, kv_heads, _, keys, head in DECODE:
        x = kind.swapped(batch, kv_heads, keys, head)
        yield Case(f"[{batch}, {kv_heads}, {keys}, {head}]", {"x": x}, rounds_to=kind.dtype)


#: What an NPU's kernel tells apart.
LAYOUTS = tuple(
    " ".join(f"{phase} {hides} {beside}".split())
    for phase in ("prefill", "decode")
    for hides in ("", "full", "mask", "mask causal", "mask window", "window")
    for beside in ("", "cache")
)


@makes_cases("int8_attention", *LAYOUTS, varied=("prefill", "decode", "decode cache"))
def int8_attention(kind: Kind) -> Iterator[Case]:
    spare = SPARE if "cache" in kind.words else 0
    for case in attention(kind):
        states = {name: _rows(case.arguments[name], spare) for name in ("key", "value")}
        # Rounded are the probabilities, before the product with the integers.
        yield replace(case, arguments=case.arguments | states, rounds_to=kind.dtype)


def _rows(states: Tensor, spare: int) -> Tensor:
    """Rows of ``states``, the front of a cache with ``spare`` others behind them, never written."""
    rows = torch.nn.functional.pad(rows_of(states), (0, 0, 0, spare), value=-1)
    return rows[:, :, : states.shape[2]]
