"""Cases of paged attention: requests that decode, begin, and go on behind a prefix, in pages in any order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..case import Case, Kind, makes_cases

#: (queries, keys) of each request, heads, kv heads, rows of a page, head size.
SIZES = (
    (((1, 33), (1, 7), (1, 16)), 4, 2, 16, 64),
    (((1, 130),), 2, 2, 128, 128),
    (((9, 9), (1, 40), (5, 37)), 6, 2, 16, 128),
    (((20, 20), (3, 3)), 4, 1, 32, 64),
)
#: From `LONG_FROM` keys on, beside short ones: requests that decode, and a prompt behind a prefix.
LONG_SIZES = (
    (((1, 8200), (1, 17)), 2, 1, 128, 128),
    (((1, 32768),), 2, 2, 128, 128),
    (((9, 2060), (1, 40)), 4, 2, 16, 128),
)
OPTIONS = ("", "full", "window", "softcap", "sinks", "window sinks")
LAYOUTS = tuple(f"{place} {option}".strip() for place in ("pages", "packed") for option in OPTIONS)
#: Pages of the cache that no request has.
SPARE = 2


@makes_cases("paged_attention", *LAYOUTS, varied=("pages", "packed"))
def paged_attention(kind: Kind) -> Iterator[Case]:
    place, *options = kind.words
    for requests, usual_heads, kv_heads, rows, usual in LONG_SIZES if kind.is_long else SIZES:
        head = kind.head or usual
        # Of unusual sizes the operator wants groups.
        heads = usual_heads if _is_usual(head) else max(usual_heads, 2 * kv_heads)
        tokens, keys = sum(q for q, _ in requests), sum(k for _, k in requests)
        arguments: dict[str, Any] = {
            "query": kind.normal(tokens, heads, head),
            "cu_seqlens_q": _sums([q for q, _ in requests]),
            "cu_seqlens_k": _sums([k for _, k in requests]),
            "block_table": None,
            "scaling": 1.5 * head**-0.5,
        }
        pages = 1
        if place == "pages":
            counts = [-(-k // rows) for _, k in requests]
            pages = sum(counts) + SPARE
            order = kind.different(pages, pages).int()
            table = torch.zeros(len(requests), max(counts), dtype=torch.int32, device="cpu")
            for request, count in enumerate(counts):
                first = sum(counts[:request])
                table[request, :count] = order[first : first + count]
            arguments["block_table"] = table
        for name in ("key", "value"):
            arguments[name] = kind.normal(pages, rows if place == "pages" else keys, kv_heads, head)
        for option in options:
            arguments |= _option(option, kind, heads)
        yield Case(f"{requests} in {rows}, {heads} and {kv_heads} heads, {head}", arguments)


def _option(name: str, kind: Kind, heads: int) -> dict[str, Any]:
    match name:
        case "full":
            return {"is_causal": False}
        case "window":
            return {"sliding_window": 4}
        case "sinks":
            return {"sinks": kind.normal(heads)}
        case _:
            return {"softcap": 2.0}


def _is_usual(head: int) -> bool:
    """Whether packed tokens of an NPU have heads of this size with every option."""
    return head in (64, 128, 192)


def _sums(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], device="cpu").cumsum(0).int()
