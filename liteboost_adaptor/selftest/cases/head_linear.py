"""Cases of head_linear."""

from __future__ import annotations

from collections.abc import Iterator

from ..case import Case, Kind, makes_cases


@makes_cases("head_linear")
def head_linear(kind: Kind) -> Iterator[Case]:
    for batch, heads, rows, inputs, outputs in ((1, 4, 1, 128, 512), (3, 2, 1, 512, 128), (2, 3, 5, 33, 17)):
        label = f"{batch} x {heads} heads, {rows} rows, {inputs} inputs and {outputs} outputs"
        weight = kind.normal(heads, outputs, inputs, scale=inputs**-0.5)
        yield Case(label, {"x": kind.swapped(batch, heads, rows, inputs), "weight": weight})
        both = kind.normal(heads, inputs + 16, outputs, scale=inputs**-0.5)
        of_parts = {"x": kind.strided(batch, heads, rows, inputs), "weight": both[:, :inputs].mT}
        yield Case(f"{label}, of parts", of_parts)
