"""Cases of linear layers, alone and in a gated MLP: one row, as decoding has it, and more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ...ops.activation import ACTIVATIONS
from ..case import Case, Kind, makes_cases

#: (rows, in_features, out_features)
SIZES = ((1, 64, 96), (1, 1024, 256), (7, 128, 64), (16, 96, 160), (64, 256, 512))


#: Those for FRACTAL_NZ: whole blocks of 16 x 16, and weights that are padded.
NZ_SIZES = ((1, 64, 96), (1, 1024, 256), (7, 72, 50))
FORMS = (*ACTIVATIONS, "silu clipped")


@makes_cases("linear", "", "bias", "nz", "nz bias")
def linear(kind: Kind) -> Iterator[Case]:
    if "nz" in kind.words:
        yield from _linear_in_nz(kind)
        return
    for rows, inputs, outputs in SIZES:
        x, weight = kind.normal(1, rows, inputs), kind.normal(outputs, inputs, scale=inputs**-0.5)
        label = f"[{rows}, {inputs}] x [{outputs}, {inputs}]"
        yield Case(label, {"x": x, "weight": weight, "bias": _bias(kind, outputs)})
    x, weight = kind.strided(2, 3, 96), kind.normal(64, 96, scale=0.1)
    yield Case("[2, 3, 96] strided x [64, 96]", {"x": x, "weight": weight, "bias": _bias(kind, 64)})


def _bias(kind: Kind, size: int) -> Tensor | None:
    return kind.normal(size) if "bias" in kind.words else None


def _linear_in_nz(kind: Kind) -> Iterator[Case]:
    for rows, inputs, outputs in NZ_SIZES:
        x, weight = kind.normal(1, rows, inputs), kind.normal(outputs, inputs, scale=inputs**-0.5)
        bias = _bias(kind, outputs)
        label = f"[{rows}, {inputs}] x [{outputs}, {inputs}] in NZ{' + bias' if bias is not None else ''}"
        yield Case(label, {"x": x, "weight": weight, "bias": bias}, in_nz=("weight",))


@makes_cases(
    "gated_linear", *(f"{form}{layout}" for layout in ("", " bias", " nz", " nz bias") for form in FORMS)
)
def gated_linear(kind: Kind) -> Iterator[Case]:
    form = {"activation": kind.words[0], "alpha": 1.702 if "clipped" in kind.words else 1.0}
    if "nz" in kind.words:
        yield from _gated_linear_in_nz(kind, form)
        return
    for rows, inputs, outputs in SIZES[:4]:
        x = kind.normal(1, rows, inputs)
        gate, up = (kind.normal(outputs, inputs, scale=inputs**-0.5) for _ in range(2))
        gate_bias, up_bias = kind.normal(2, outputs)
        label = f"[{rows}, {inputs}] x 2 [{outputs}, {inputs}]"
        arguments = {"x": x, "gate_weight": gate, "gate_bias": None, "up_weight": up, "up_bias": None, **form}
        if "bias" not in kind.words:
            yield Case(label, arguments)
            continue
        yield Case(f"{label} + biases", {**arguments, "gate_bias": gate_bias, "up_bias": up_bias})
        yield Case(f"{label} + one bias", {**arguments, "up_bias": up_bias})


def _gated_linear_in_nz(kind: Kind, form: dict[str, Any]) -> Iterator[Case]:
    for rows, inputs, outputs in ((1, 64, 96), (7, 72, 64)):
        x = kind.normal(1, rows, inputs)
        gate, up = (kind.normal(outputs, inputs, scale=inputs**-0.5) for _ in range(2))
        biases = tuple(kind.normal(2, outputs)) if "bias" in kind.words else (None, None)
        arguments = {
            "x": x,
            "gate_weight": gate,
            "gate_bias": biases[0],
            "up_weight": up,
            "up_bias": biases[1],
            **form,
        }
        label = f"[{rows}, {inputs}] x 2 [{outputs}, {inputs}]{' + biases' if 'bias' in kind.words else ''}"
        yield Case(f"{label} in NZ", arguments, in_nz=("gate_weight", "up_weight"))
        yield Case(f"{label}, gate in NZ", arguments, in_nz=("gate_weight",))
