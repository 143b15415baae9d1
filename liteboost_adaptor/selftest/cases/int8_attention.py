"""Cases of attention over rows of integers: a prompt and one token, and how such rows are made."""

from __future__ import annotations

from collections.abc import Iterator

from ...ops.int8_attention import int8_rows as rows_of
from ..case import Case, Kind, makes_cases
from .attention import DECODE, PREFILL


@makes_cases("int8_rows")
def int8_rows(kind: Kind) -> Iterator[Case]:
    for batch, _, kv_heads, _, keys, head in DECODE:
        x = kind.swapped(batch, kv_heads, keys, head)
        yield Case(f"[{batch}, {kv_heads}, {keys}, {head}]", {"x": x}, rounds_to=kind.dtype)


@makes_cases("int8_attention", "", "causal")
def int8_attention(kind: Kind) -> Iterator[Case]:
    for batch, heads, kv_heads, queries, keys, head in (*PREFILL, *DECODE):
        yield Case(
            f"{batch} x {heads} and {kv_heads} heads, {queries} and {keys} positions, {head}",
            {
                "query": kind.swapped(batch, heads, queries, head),
                "key": rows_of(kind.normal(batch, kv_heads, keys, head)),
                "value": rows_of(kind.normal(batch, kv_heads, keys, head)),
                "mask": None,
                "scaling": 1.5 * head**-0.5,
                "is_causal": kind.layout == "causal",
            },
            rounds_to=kind.dtype,  # probabilities, before the product with the integers
        )
