"""Cases of the ops that round a weight to integers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..case import Case, Kind, makes_cases

SIZES = ((1, 64), (7, 128), (33, 384))


@makes_cases("quantize_w8")
def quantize_w8(kind: Kind) -> Iterator[Case]:
    for size in SIZES:
        yield Case(str(list(size)), {"weight": kind.normal(*size), "scale_dtype": torch.float32})


@makes_cases("quantize_w4")
def quantize_w4(kind: Kind) -> Iterator[Case]:
    for size in SIZES:
        for symmetric in (True, False):
            form = {"group_size": 32, "symmetric": symmetric, "scale_dtype": torch.bfloat16}
            yield Case(f"{list(size)}, symmetric={symmetric}", {"weight": kind.normal(*size), **form})
