"""Cases of the rotation: several heads and positions, so that an exchange of the two shows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..case import Case, Kind, makes_cases

#: (batch, heads of q, heads of k, positions, head size)
SIZES = ((1, 4, 2, 1, 64), (2, 3, 1, 5, 128), (2, 8, 2, 7, 64))


@makes_cases("rope", "half", "interleaved", "deinterleave")
def rope(kind: Kind) -> Iterator[Case]:
    for batch, heads, kv_heads, length, size in SIZES:
        positions = kind.integers(1000, batch, length).float()
        angles = positions[..., None] * 100.0 ** -torch.linspace(0, 1, size // 2, dtype=torch.float32)
        angles = angles.repeat_interleave(2, -1) if kind.layout == "interleaved" else angles.repeat(1, 1, 2)
        tables = {"cos": angles.cos().to(kind.dtype), "sin": angles.sin().to(kind.dtype)}
        label = f"{heads} and {kv_heads} heads, {batch} x {length} positions, {size}"
        q, k = (kind.swapped(batch, count, length, size) for count in (heads, kv_heads))
        yield Case(label, {"q": q, "k": k, **tables, "layout": kind.layout})
        q, k = (kind.normal(batch, length, count, size) for count in (heads, kv_heads))
        yield Case(
            f"{label}, heads behind", {"q": q, "k": k, **tables, "layout": kind.layout, "unsqueeze_dim": 2}
        )
