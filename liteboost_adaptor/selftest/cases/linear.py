"""Cases of linear layers, alone and in a gated MLP: one row, as decoding has it, and more."""

from __future__ import annotations

from collections.abc import Iterator

from ...ops.activation import ACTIVATIONS
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


@makes_cases("gated_linear", *ACTIVATIONS, "silu clipped")
def gated_linear(kind: Kind) -> Iterator[Case]:
    form = {"activation": kind.words[0], "alpha": 1.702 if "clipped" in kind.words else 1.0}
    for rows, inputs, outputs in SIZES[:4]:
        x = kind.normal(1, rows, inputs)
        gate, up = (kind.normal(outputs, inputs, scale=inputs**-0.5) for _ in range(2))
        gate_bias, up_bias = kind.normal(2, outputs)
        label = f"[{rows}, {inputs}] x 2 [{outputs}, {inputs}]"
        arguments = {"x": x, "gate_weight": gate, "gate_bias": None, "up_weight": up, "up_bias": None, **form}
        yield Case(label, arguments)
        yield Case(f"{label} + biases", {**arguments, "gate_bias": gate_bias, "up_bias": up_bias})
        yield Case(f"{label} + one bias", {**arguments, "up_bias": up_bias})
