"""Cases of attention: as many heads, positions and batches as differ from each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..case import Case, Kind, makes_cases

#: (batch, heads, kv heads, queries, keys, head size); queries are 1 where a token is decoded.
PREFILL = ((1, 2, 2, 16, 16, 64), (2, 4, 1, 9, 9, 128), (2, 6, 2, 5, 21, 64), (2, 4, 4, 6, 11, 96))
DECODE = ((1, 2, 2, 1, 16, 64), (3, 4, 1, 1, 33, 128), (2, 8, 2, 1, 130, 64), (2, 4, 4, 1, 11, 96))
#: From `LONG_FROM` keys on: a prompt of more than a block of the causal mask, and the end of longer ones.
LONG_PREFILL = ((1, 1, 1, 2304, 2304, 128), (1, 2, 1, 16, 8200, 128), (1, 2, 2, 3, 32768, 128))
LONG_DECODE = ((1, 2, 1, 1, 2052, 128), (2, 2, 1, 1, 8200, 128), (1, 2, 2, 1, 32768, 128))
#: By how much a key of MLA is wider than a value: the part that is rotated.
ROTATED = 64
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


def sizes(kind: Kind) -> Iterator[tuple[int, ...]]:
    """Of the cases of a kind: those of its phase and length class, with its head size where it has one."""
    phase = kind.words[0]
    if kind.is_long:
        found = LONG_PREFILL if phase == "prefill" else LONG_DECODE
    else:
        found = PREFILL if phase == "prefill" else DECODE
    for *size, head in found:
        yield (*size, kind.head or head)


@makes_cases("attention", *LAYOUTS, varied=("prefill", "decode", "decode cache", "decode mask"))
def attention(kind: Kind) -> Iterator[Case]:
    _, *options = kind.words
    for size in sizes(kind):
        batch, heads, kv_heads, queries, keys, head = size
        key_head = head + ROTATED * ("narrow-values" in options)
        arguments: dict[str, Any] = {
            "query": kind.swapped(batch, heads, queries, key_head),
            "mask": None,
            "scaling": 1.5 * head**-0.5,
            "is_causal": True,
        }
        for option in options:
            arguments |= _option(option, kind, size)
        label = f"{batch} x {heads} and {kv_heads} heads, {queries} and {keys} positions, {head}"
        spare = SPARE if "cache" in options else 0
        orders = (("", kind.normal), (", all with positions before heads", kind.swapped))
        for order, make in orders[: 1 if kind.is_long else 2]:
            for name, width in (("key", key_head), ("value", head)):
                states = make(batch, kv_heads, keys + spare, width)
                states[:, :, keys:] = torch.nan  # never written, so anything may stand there
                arguments[name] = states[:, :, :keys]
            yield Case(label + order, dict(arguments))


@makes_cases("_npu_softcap_attention")
def softcap_attention(kind: Kind) -> Iterator[Case]:
    for batch, heads, kv_heads, _, keys, head in DECODE:
        seen = torch.rand(batch, 1, 1, keys, generator=torch.Generator("cpu").manual_seed(keys)) < 0.7
        seen[..., -1] = True
        arguments: dict[str, Any] = {
            "query": kind.swapped(batch, heads, 1, head),
            "key": kind.normal(batch, kv_heads, keys + SPARE, head)[:, :, :keys],
            "value": kind.normal(batch, kv_heads, keys + SPARE, head)[:, :, :keys],
            "mask": None,
            "scaling": 1.5 * head**-0.5,
            "softcap": 2.0,
        }
        label = f"{batch} x {heads} and {kv_heads} heads, {keys} positions, {head}"
        yield Case(label, dict(arguments))
        lowest = torch.finfo(kind.dtype).min
        mask = torch.where(seen, 0.0, lowest).to(kind.dtype)
        yield Case(f"{label}, with a mask", arguments | {"mask": mask})


@makes_cases("_npu_latent_attention", "", "cache")
def latent_attention(kind: Kind) -> Iterator[Case]:
    rank, rope, spare = 512, 64, SPARE if kind.words else 0
    for batch, heads, keys in ((1, 8, 16), (3, 2, 33), (1, 4, LONG_DECODE[0][4])):
        cached = {}
        for name, width in (("latent", rank), ("key_rope", rope)):
            rows = kind.normal(batch, 1, keys + spare, width)
            rows[:, :, keys:] = torch.nan  # never written, so anything may stand there
            cached[name] = rows[:, :, :keys]
        query = kind.normal(batch, heads, 1, rank + rope)
        parts = {"query": query[..., :rank].contiguous(), "query_rope": query[..., rank:].contiguous()}
        label = f"{batch} x {heads} heads, {keys} positions"
        yield Case(label, {**parts, **cached, "scaling": 1.5 * (rank + rope) ** -0.5})


#: Layouts of parts of the keys; queries stand behind the last of them, or causality hides some.
PARTS = tuple(
    " ".join(f"{phase} {hides} {beside}".split())
    for phase in ("prefill", "decode")
    for hides in ("", "causal", "mask", "mask causal", "softcap")
    for beside in ("", "cache", "narrow-values", "cache narrow-values")
)


@makes_cases("attention_part", *PARTS, varied=("prefill", "decode", "decode cache"))
def attention_part(kind: Kind) -> Iterator[Case]:
    _, *options = kind.words
    for size in sizes(kind):
        batch, heads, kv_heads, queries, keys, head = size
        key_head = head + ROTATED * ("narrow-values" in options)
        arguments = {
            "query": kind.swapped(batch, heads, queries, key_head),
            "mask": _option("mask", kind, size)["mask"] if "mask" in options else None,
            "scaling": 1.5 * head**-0.5,
            "is_causal": "causal" in options,
            "softcap": 2.0 if "softcap" in options else 0.0,
        }
        spare = SPARE if "cache" in options else 0
        for name, width in (("key", key_head), ("value", head)):
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
