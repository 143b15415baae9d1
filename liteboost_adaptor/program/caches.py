"""What a cache is made of: layers, or beside an encoder two caches with layers of their own."""

from __future__ import annotations

from typing import Any

import torch

#: Attributes of a cache that are caches.
INNER = ("self_attention_cache", "cross_attention_cache")
#: Attributes of a cache that are its parts, and not what it keeps.
PARTS = ("layers", *INNER)


def appended_layers(cache: Any) -> list[Any] | None:
    """The layers of ``cache`` that every token is appended to, or ``None`` where it has no list of them."""
    layers = getattr(getattr(cache, INNER[0], cache), "layers", None)
    return layers if type(layers) is list else None


def is_begun(cache: Any) -> bool:
    """Whether anything has been appended to ``cache``."""
    layers = appended_layers(cache)
    return layers is None or (bool(layers) and getattr(layers[0], "is_initialized", True) is not False)


def keeps_tokens(cache: Any) -> bool:
    """Whether tokens lie in ``cache`` already, as far as what its layers keep says so."""
    return any(_keeps_tokens(getattr(layer, "__dict__", {})) for layer in appended_layers(cache) or ())


def _keeps_tokens(own: dict[str, Any]) -> bool:
    length, keys = own.get("cumulative_length"), own.get("keys")
    if isinstance(length, torch.Tensor):  # of a static cache, whose memory is there before any token
        return length.device.type == "cpu" and bool(length.any())
    if isinstance(keys, torch.Tensor):
        return keys.numel() > 0
    states = own.get("has_previous_state")
    return any(each is True for each in (states.values() if type(states) is dict else [states]))


def parts(cache: Any) -> list[Any]:
    """What keeps anything in ``cache``, beside its own attributes: the layers that it has.

    Of a cache for a decoder beside an encoder (``EncoderDecoderCache``) the layers of both of its caches,
    these caches, and itself, which keeps by layer whether the encoder's output has been read.

    Raises:
        AttributeError: It is no cache with layers.
    """
    inner = [each for name in INNER if (each := getattr(cache, name, None)) is not None]
    if len(inner) < len(INNER):
        return cache.layers
    return [*(layer for each in inner for layer in each.layers), *inner, cache]
