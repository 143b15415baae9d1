"""Cases of the activations: separate tensors, and halves of one as a fused projection gives them."""

from __future__ import annotations

from collections.abc import Iterator

from ...ops.activation import ACTIVATIONS
from ..case import Case, Kind, makes_cases

SIZES = ((1, 1, 64), (2, 5, 96), (3, 7, 129), (1, 16, 1024))


@makes_cases("gated_activation", *ACTIVATIONS)
def gated_activation(kind: Kind) -> Iterator[Case]:
    for size in SIZES:
        gate, up = kind.normal(*size, scale=2.0), kind.normal(*size)
        yield Case(str(list(size)), {"gate": gate, "up": up, "activation": kind.layout})
    gate, up = kind.normal(2, 6, 384, scale=2.0).chunk(2, dim=-1)
    yield Case("[2, 6, 192], halves of one", {"gate": gate, "up": up, "activation": kind.layout})


@makes_cases("activation", *ACTIVATIONS)
def activation(kind: Kind) -> Iterator[Case]:
    for size in SIZES:
        yield Case(str(list(size)), {"x": kind.normal(*size, scale=2.0), "activation": kind.layout})
    yield Case("[4, 3, 96] strided", {"x": kind.strided(4, 3, 96, scale=2.0), "activation": kind.layout})
