"""Cases of the linear layer: one row, as decoding has it, and more."""

from __future__ import annotations

from collections.abc import Iterator

from ..case import Case, Kind, makes_cases

#: (rows, in_features, out_features)
SIZES = ((1, 64, 96), (1, 1024, 256), (7, 128, 64), (16, 96, 160), (64, 256, 512))


@makes_cases("linear")
def linear(kind: Kind) -> Iterator[Case]:
    for rows, inputs, outputs in SIZES:
        x, weight = kind.normal(1, rows, inputs), kind.normal(outputs, inputs, scale=inputs**-0.5)
        label = f"[{rows}, {inputs}] x [{outputs}, {inputs}]"
        yield Case(label, {"x": x, "weight": weight})
        yield Case(f"{label} + bias", {"x": x, "weight": weight, "bias": kind.normal(outputs)})
    x, weight = kind.strided(2, 3, 96), kind.normal(64, 96, scale=0.1)
    yield Case("[2, 3, 96] strided x [64, 96]", {"x": x, "weight": weight})
