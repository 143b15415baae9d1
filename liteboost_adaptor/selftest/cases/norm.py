"""Cases of the norms: one row and several, odd and even widths, a row's width from small to a model's."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ...ops.norm import GATES
from ..case import Case, Kind, makes_cases

SIZES = ((1, 1, 64), (2, 7, 96), (3, 5, 131), (1, 16, 4, 128), (2, 1, 2048))
#: Seen in the result, as a model's own eps of 1e-6 is not.
EPS = 0.25


def _inputs(kind: Kind) -> Iterator[tuple[str, Tensor]]:
    for size in SIZES:
        yield str(list(size)), kind.normal(*size)
    yield "[4, 3, 96] strided", kind.strided(4, 3, 96)
    yield "[2, 6, 3, 64] heads before positions", kind.swapped(2, 6, 3, 64)


def _weight(kind: Kind, x: Tensor) -> Tensor | None:
    if "weightless" in kind.words:
        return None
    size = x.shape[-2:] if "groups" in kind.words else x.shape[-1:]
    return kind.normal(*size, scale=0.5, mean=0.0 if "offset" in kind.words else 1.0)


#: What a kernel may tell apart: Gemma's weight, none, one for each group of channels.
SCALES = ("", "offset", "weightless", "groups", "offset groups")


@makes_cases("rms_norm", *SCALES)
def rms_norm(kind: Kind) -> Iterator[Case]:
    offset = 1.0 if "offset" in kind.words else 0.0
    for label, x in _inputs(kind):
        weight = _weight(kind, x)
        yield Case(label, {"x": x, "weight": weight, "eps": EPS, "weight_offset": offset, "late": True})


@makes_cases("add_rms_norm", *SCALES)
def add_rms_norm(kind: Kind) -> Iterator[Case]:
    offset = 1.0 if "offset" in kind.words else 0.0
    for label, x in _inputs(kind):
        arguments = {"x": x, "residual": kind.normal(*x.shape), "weight": _weight(kind, x), "eps": EPS}
        yield Case(label, {**arguments, "weight_offset": offset, "late": True})


@makes_cases("inverse_rms")
def inverse_rms(kind: Kind) -> Iterator[Case]:
    for label, x in _inputs(kind):
        yield Case(label, {"x": x, "eps": EPS})


@makes_cases(
    "gated_rms_norm", *(f"{gate}{order}" for gate in GATES for order in ("", " first", " first groups"))
)
def gated_rms_norm(kind: Kind) -> Iterator[Case]:
    for label, x in _inputs(kind):
        arguments = {"x": x, "gate": kind.normal(*x.shape), "weight": kind.normal(x.shape[-1], mean=1.0)}
        groups = 3 if x.shape[-1] % 3 == 0 else 1 if x.shape[-1] % 2 else 4
        yield Case(
            label,
            {
                **arguments,
                "eps": EPS,
                "activation": kind.words[0],
                "gate_first": "first" in kind.words,
                "group_size": x.shape[-1] // groups if "groups" in kind.words else 0,
            },
        )


@makes_cases("layer_norm", "", "bias", "weightless", "weightless bias")
def layer_norm(kind: Kind) -> Iterator[Case]:
    for label, x in _inputs(kind):
        bias = kind.normal(x.shape[-1], scale=0.5) if "bias" in kind.words else None
        yield Case(label, {"x": x, "weight": _weight(kind, x), "bias": bias, "eps": EPS})
