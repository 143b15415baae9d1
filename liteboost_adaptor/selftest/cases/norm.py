"""Cases of the norms: one row and several, odd and even widths, a row's width from small to a model's."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ..case import Case, Kind, makes_cases

SIZES = ((1, 1, 64), (2, 7, 96), (3, 5, 131), (1, 16, 4, 128), (2, 1, 2048))
#: Seen in the result, as a model's own eps of 1e-6 is not.
EPS = 0.25


def _inputs(kind: Kind) -> Iterator[tuple[str, Tensor]]:
    for size in SIZES:
        yield str(list(size)), kind.normal(*size)
    yield "[4, 3, 96] strided", kind.strided(4, 3, 96)
    yield "[2, 6, 3, 64] heads before positions", kind.swapped(2, 6, 3, 64)


def _weight(kind: Kind, x: Tensor) -> Tensor:
    return kind.normal(x.shape[-1], scale=0.5, mean=0.0 if "offset" in kind.words else 1.0)


@makes_cases("rms_norm", "", "offset")
def rms_norm(kind: Kind) -> Iterator[Case]:
    offset = 1.0 if "offset" in kind.words else 0.0
    for label, x in _inputs(kind):
        weight = _weight(kind, x)
        yield Case(label, {"x": x, "weight": weight, "eps": EPS, "weight_offset": offset, "late": True})


@makes_cases("add_rms_norm")
def add_rms_norm(kind: Kind) -> Iterator[Case]:
    for label, x in _inputs(kind):
        residual = kind.normal(*x.shape)
        yield Case(
            label, {"x": x, "residual": residual, "weight": _weight(kind, x), "eps": EPS, "late": True}
        )


@makes_cases("inverse_rms")
def inverse_rms(kind: Kind) -> Iterator[Case]:
    for label, x in _inputs(kind):
        yield Case(label, {"x": x, "eps": EPS})


@makes_cases("gated_rms_norm")
def gated_rms_norm(kind: Kind) -> Iterator[Case]:
    for label, x in _inputs(kind):
        gate = kind.normal(*x.shape)
        yield Case(label, {"x": x, "gate": gate, "weight": _weight(kind, x), "eps": EPS})


@makes_cases("layer_norm")
def layer_norm(kind: Kind) -> Iterator[Case]:
    for label, x in _inputs(kind):
        weight, bias = _weight(kind, x), kind.normal(x.shape[-1], scale=0.5)
        yield Case(label, {"x": x, "weight": weight, "bias": bias, "eps": EPS})
    x = kind.normal(3, 160)
    yield Case("[3, 160] without weight", {"x": x, "weight": None, "bias": None, "eps": EPS})
