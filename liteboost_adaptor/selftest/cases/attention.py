"""Cases of attention: as many heads, positions and batches as differ from each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..case import Case, Kind, makes_cases

#: (batch, heads, kv heads, queries, keys, head size); queries are 1 where a token is decoded.
PREFILL = ((1, 2, 2, 16, 16, 64), (2, 4, 1, 9, 9, 128), (2, 6, 2, 5, 21, 64))
DECODE = ((1, 2, 2, 1, 16, 64), (3, 4, 1, 1, 33, 128), (2, 8, 2, 1, 130, 64))
#: What hides keys, or else changes the logits; "" is causality alone.
OPTIONS = ("", "full", "mask", "bias", "window", "softcap")
#: What may come on top: sinks; keys and values that are the front of a longer cache.
BESIDE = ("", "sinks", "cache", "sinks cache")
#: Positions of a cache behind those that count.
SPARE = 7
#: What a kernel may tell apart.
LAYOUTS = tuple(
    " ".join(f"{phase} {option} {beside}".split())
    for phase in ("prefill", "decode")
    for option in OPTIONS
    for beside in BESIDE
)


@makes_cases("attention", *LAYOUTS)
def attention(kind: Kind) -> Iterator[Case]:
    phase, *options = kind.words
    for size in PREFILL if phase == "prefill" else DECODE:
        batch, heads, kv_heads, queries, keys, head = size
        arguments: dict[str, Any] = {
            "query": kind.swapped(batch, heads, queries, head),
            "mask": None,
            "scaling": 1.5 * head**-0.5,
            "is_causal": True,
        }
        for option in options:
            arguments |= _option(option, kind, size)
        label = f"{batch} x {heads} and {kv_heads} heads, {queries} and {keys} positions, {head}"
        spare = SPARE if "cache" in options else 0
        for order, make in (("", kind.normal), (", all with positions before heads", kind.swapped)):
            for name in ("key", "value"):
                states = make(batch, kv_heads, keys + spare, head)
                states[:, :, keys:] = torch.nan  # never written, so anything may stand there
                arguments[name] = states[:, :, :keys]
            yield Case(label + order, dict(arguments))


def _option(name: str, kind: Kind, size: tuple[int, ...]) -> dict[str, Any]:
    batch, heads, _, queries, keys, _ = size
    match name:
        case "mask":  # rows padded at the left; every query sees itself, as in a mask of transformers
            padding = torch.arange(batch, device="cpu")[:, None, None, None] * 2
            key_at = torch.arange(keys, device="cpu")
            query_at = torch.arange(keys - queries, keys, device="cpu")[:, None]
            visible = (key_at >= padding) & (key_at <= query_at) | (key_at == query_at)
            return {"mask": visible, "is_causal": False}
        case "full":
            return {"is_causal": False}
        case "bias":
            return {"mask": kind.normal(batch, heads, queries, keys)}
        case "window":
            return {"sliding_window": 4}
        case "sinks":
            return {"sinks": kind.normal(heads)}
        case "cache":
            return {}
        case _:
            return {"softcap": 2.0}
