"""Cases of attention: as many heads, positions and batches as differ from each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..case import Case, Kind, makes_cases

#: (batch, heads, kv heads, queries, keys, head size); queries are 1 where a token is decoded.
PREFILL = ((1, 2, 2, 16, 16, 64), (2, 4, 1, 9, 9, 128), (2, 6, 2, 5, 21, 64), (2, 4, 4, 6, 11, 96))
DECODE = ((1, 2, 2, 1, 16, 64), (3, 4, 1, 1, 33, 128), (2, 8, 2, 1, 130, 64), (2, 4, 4, 1, 11, 96))
#: Sizes of a key and a value of MLA where a key is expanded.
NARROW_SIZES = (192, 128)
#: What hides keys, or else changes the logits; "" is causality alone.
MASKS = tuple(f"{mask} {beside}".strip() for mask in ("mask", "bias") for beside in ("", "causal", "window"))
OPTIONS = ("", "full", *MASKS, "window", "softcap")
#: What may come on top: sinks, or such as not every operator takes; a cache with more behind the keys.
BESIDE = ("", "sinks", "late-sinks", "cache", "sinks cache", "late-sinks cache")
#: With values of another size than keys (MLA); sinks are late then, and nothing is added to the logits.
NARROW = ("", "late-sinks", "cache", "late-sinks cache")
#: Positions of a cache behind those that count.
SPARE = 7
#: What a kernel may tell apart.
LAYOUTS = tuple(
    " ".join(f"{phase} {option} {beside}".split())
    for phase in ("prefill", "decode")
    for option in OPTIONS
    for beside in (*BESIDE, *(f"{other} narrow-values" for other in NARROW if "bias" not in option))
)


@makes_cases("attention", *LAYOUTS)
def attention(kind: Kind) -> Iterator[Case]:
    phase, *options = kind.words
    for size in PREFILL if phase == "prefill" else DECODE:
        batch, heads, kv_heads, queries, keys, _ = size
        head, value_head = NARROW_SIZES if "narrow-values" in options else (size[5], size[5])
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
            for name, width in (("key", head), ("value", value_head)):
                states = make(batch, kv_heads, keys + spare, width)
                states[:, :, keys:] = torch.nan  # never written, so anything may stand there
                arguments[name] = states[:, :, :keys]
            yield Case(label + order, dict(arguments))


#: Layouts of parts of the keys; queries stand behind the last of them, or causality hides some.
PARTS = tuple(
    " ".join(f"{phase} {hides} {beside}".split())
    for phase in ("prefill", "decode")
    for hides in ("", "causal", "mask", "mask causal", "softcap")
    for beside in ("", "cache", "narrow-values", "cache narrow-values")
)


@makes_cases("attention_part", *PARTS)
def attention_part(kind: Kind) -> Iterator[Case]:
    phase, *options = kind.words
    for size in PREFILL if phase == "prefill" else DECODE:
        batch, heads, kv_heads, queries, keys, _ = size
        head, value_head = NARROW_SIZES if "narrow-values" in options else (size[5], size[5])
        arguments = {
            "query": kind.swapped(batch, heads, queries, head),
            "mask": _option("mask", kind, size)["mask"] if "mask" in options else None,
            "scaling": 1.5 * head**-0.5,
            "is_causal": "causal" in options,
            "softcap": 2.0 if "softcap" in options else 0.0,
        }
        spare = SPARE if "cache" in options else 0
        for name, width in (("key", head), ("value", value_head)):
            states = kind.normal(batch, kv_heads, keys + spare, width)
            states[:, :, keys:] = torch.nan  # never written, so anything may stand there
            arguments[name] = states[:, :, :keys]
        yield Case(
            f"{batch} x {heads} and {kv_heads} heads, {queries} and {keys} positions, {head}",
            arguments,
            rounds_to=kind.dtype,  # probabilities, before the product with the values, or parts of the output
        )


def _option(name: str, kind: Kind, size: tuple[int, ...]) -> dict[str, Any]:
    batch, heads, _, queries, keys, _ = size
    match name:
        case "mask":  # padded at the left as in transformers; the last sequence has a query that sees nothing
            padding = torch.arange(batch, device="cpu")[:, None, None, None] * 2
            key_at = torch.arange(keys, device="cpu")
            query_at = torch.arange(keys - queries, keys, device="cpu")[:, None]
            visible = (key_at >= padding) & (key_at <= query_at) | (key_at == query_at)
            if batch > 1:
                visible[-1, :, 0] = False
            return {"mask": visible, "is_causal": False}
        case "full":
            return {"is_causal": False}
        case "causal":
            return {"is_causal": True}
        case "bias":
            return {"mask": _bias(kind, size), "is_causal": False}
        case "window":
            return {"is_causal": True, "sliding_window": 4}
        case "sinks":
            return {"sinks": kind.normal(heads)}
        case "late-sinks":
            return {"sinks": kind.normal(batch, heads, queries)}
        case "cache" | "narrow-values":
            return {}
        case _:
            return {"softcap": 2.0}


def _bias(kind: Kind, size: tuple[int, ...]) -> torch.Tensor:
    """Numbers, the lowest number and -inf: rows with all three, in the last sequence without the first."""
    batch, heads, _, queries, keys, _ = size
    lowest = torch.finfo(kind.dtype).min
    mask = kind.normal(batch, heads, queries, keys)
    mask[..., 1] = lowest
    mask[..., 2] = -torch.inf
    if batch > 1:
        mask[-1, 0, 0] = -torch.inf
        mask[-1, 1, 0] = lowest
        mask[-1, 1, 0, 1::2] = -torch.inf
    return mask
