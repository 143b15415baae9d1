"""Cases of the activations: separate tensors, and halves of one as a fused projection gives them."""

from __future__ import annotations

from collections.abc import Iterator

from ...ops.activation import ACTIVATIONS
from ..case import Case, Kind, makes_cases

SIZES = ((1, 1, 64), (2, 5, 96), (3, 7, 129), (1, 16, 1024))


#: The form of GPT-OSS, with a limit that acts.
CLIPPED = {"activation": "silu", "alpha": 1.702, "limit": 1.5, "up_offset": 1.0}


@makes_cases("gated_activation", *ACTIVATIONS, "silu clipped")
def gated_activation(kind: Kind) -> Iterator[Case]:
    form = CLIPPED if "clipped" in kind.words else {"activation": kind.layout}
    for size in SIZES:
        gate, up = kind.normal(*size, scale=2.0), kind.normal(*size)
        yield Case(str(list(size)), {"gate": gate, "up": up, **form})
    both = kind.normal(2, 6, 384, scale=2.0)
    gate, up = both.chunk(2, dim=-1)
    yield Case("[2, 6, 192], halves of one", {"gate": gate, "up": up, **form})
    yield Case("[2, 6, 192], pairs of one", {"gate": both[..., ::2], "up": both[..., 1::2], **form})
    gate, up = kind.normal(2, 3, 96, scale=2.0)
    yield Case("[3, 96], one behind the other", {"gate": gate, "up": up, **form})


@makes_cases("activation", *ACTIVATIONS, "silu slope")
def activation(kind: Kind) -> Iterator[Case]:
    form = {"activation": kind.words[0], "alpha": 1.702 if "slope" in kind.words else 1.0}
    for size in SIZES:
        yield Case(str(list(size)), {"x": kind.normal(*size, scale=2.0), **form})
    yield Case("[4, 3, 96] strided", {"x": kind.strided(4, 3, 96, scale=2.0), **form})
