"""Cases of the rotation: several heads and positions, so that an exchange of the two shows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...ops import rope as rope_ops
from ..case import Case, Kind, makes_cases

#: (batch, heads of q, heads of k, positions, head size)
SIZES = ((1, 4, 2, 1, 64), (2, 3, 1, 5, 128), (2, 8, 2, 7, 64))


#: ``widened``: tables in fp32 beside a narrower q.
LAYOUTS = tuple(f"{layout}{tables}" for layout in rope_ops.LAYOUTS for tables in ("", " widened"))


@makes_cases("rope", *LAYOUTS)
def rope(kind: Kind) -> Iterator[Case]:
    dtype = torch.float32 if "widened" in kind.words else kind.dtype
    layout = kind.words[0]
    for batch, heads, kv_heads, length, size in SIZES:
        angles = _angles(kind, (batch, length), size)
        full = angles.repeat_interleave(2, -1) if layout == "interleaved" else angles.repeat(1, 1, 2)
        label = f"{heads} and {kv_heads} heads, {batch} x {length} positions, {size}"
        q, k = (kind.swapped(batch, count, length, size) for count in (heads, kv_heads))
        yield Case(label, {"q": q, "k": k, **_tables(full, dtype), "layout": layout})
        q, k = (kind.normal(batch, length, count, size) for count in (heads, kv_heads))
        behind = {"q": q, "k": k, "layout": layout, "unsqueeze_dim": 2}
        yield Case(f"{label}, heads behind", {**behind, **_tables(full, dtype)})
        yield Case(f"{label}, one row for all", {**behind, **_tables(full[0], dtype)})
        part = _angles(kind, (1, length), size // 2)
        yield Case(
            f"{label}, half of the channels", {**behind, **_tables(part, dtype), "rotary_dim": size // 2}
        )


@makes_cases("rope_", "half")
def rope_in_place(kind: Kind) -> Iterator[Case]:
    for batch, heads, kv_heads, length, size in (*SIZES, (3, 4, 2, 1, 128)):
        angles = _angles(kind, (batch, length), size).repeat(1, 1, 2)
        label = f"{heads} and {kv_heads} heads, {batch} x {length} positions, {size}, in place"
        q, k = (kind.swapped(batch, count, length, size) for count in (heads, kv_heads))
        yield Case(label, {"q": q, "k": k, **_tables(angles, kind.dtype)})
        q, k = (kind.normal(batch, length, count, size) for count in (heads, kv_heads))
        yield Case(
            f"{label}, heads behind", {"q": q, "k": k, **_tables(angles, kind.dtype), "unsqueeze_dim": 2}
        )
        if length == 1:
            q, k = (kind.swapped(batch, count, length, size) for count in (heads, kv_heads))
            yield Case(f"{label}, one row for all", {"q": q, "k": k, **_tables(angles[:1], kind.dtype)})


def _angles(kind: Kind, positions: tuple[int, ...], channels: int) -> Tensor:
    """An angle a pair of channels."""
    frequencies = 100.0 ** -torch.linspace(0, 1, channels // 2, dtype=torch.float32)
    return kind.integers(1000, *positions).float()[..., None] * frequencies


def _tables(angles: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    return {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}
