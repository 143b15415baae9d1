"""Cases of the causal convolutions: prompts and single tokens, tokens or channels adjacent in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..case import Case, Kind, makes_cases

# batch, channels, tokens, taps
SIZES = ((1, 64, 1, 4), (2, 33, 7, 4), (1, 96, 70, 3))


def _arguments(kind: Kind, size: tuple[int, ...]) -> dict[str, Any]:
    batch, channels, tokens, taps = size
    return {
        "x": kind.normal(batch, tokens, channels).transpose(1, 2),
        "weight": kind.normal(channels, taps),
        "bias": kind.normal(channels),
    }


@makes_cases("causal_conv1d")
def causal_conv1d(kind: Kind) -> Iterator[Case]:
    for size in SIZES:
        arguments = _arguments(kind, size)
        yield Case(str(list(size)), {**arguments, "activation": "silu"})
        yield Case(f"{list(size)} plain", {**arguments, "x": arguments["x"].contiguous(), "bias": None})


@makes_cases("causal_conv1d_update")
def causal_conv1d_update(kind: Kind) -> Iterator[Case]:
    for size in SIZES:
        arguments, (batch, channels, _, taps) = _arguments(kind, size), size
        for length in (taps, taps - 1):
            form = {"state": kind.normal(batch, channels, length), "activation": "silu"}
            yield Case(f"{list(size)}, {length} kept", {**arguments, **form})
