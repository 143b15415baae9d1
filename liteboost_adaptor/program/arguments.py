"""The arguments of a step: what of them must be the same for a program to serve it."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch

from .. import eligibility

#: Arguments whose last size is how much has been seen.
GROWING = ("attention_mask",)
#: Arguments that are a cache.
CACHES = ("past_key_values", "cache_params")
#: Arguments that are the tokens of a call, or their embeddings. Beside those of a decoder, which come first,
#: the others are an encoder's.
_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
#: What we ourselves write on tensors begins so; who reads it is asked before every run.
_OURS = "_liteboost_"


def cache_name(kwargs: dict[str, Any]) -> str:
    """The argument that is a cache, or an empty string."""
    return next((name for name in CACHES if kwargs.get(name) is not None), "")


def kinds(kwargs: dict[str, Any], parameters: Container[str]) -> Any:
    """What of a call's arguments must be the same for a program to serve it, or ``None`` where none can.

    Args:
        parameters: Names that the forward has parameters for. Others may be any object: see `stand_in`.
    """
    ids, cache = kwargs.get("input_ids"), kwargs.get(cache_name(kwargs))
    if (
        type(ids) is not torch.Tensor
        or ids.dim() != 2
        or ids.shape[1] != 1
        or cache is None
        or ids.device.type not in eligibility.DEVICES
    ):
        return None
    found: list[Any] = []
    names: dict[int, str] = {}
    for name, value in kwargs.items():
        if value is None or value is True or value is False:
            found += (name, value)
        elif type(value) is torch.Tensor:
            if value.__dict__ and not all(name.startswith(_OURS) for name in value.__dict__):
                return None  # what somebody has written on it is for the forward to read
            shape: tuple[int, ...] = value.shape
            if name in GROWING:
                if len(shape) != 2:
                    return None
                shape = shape[:1]
            # One tensor that is handed in twice has one slot.
            found += (name, shape, value.dtype, names.setdefault(id(value), name))
        elif value is cache:
            layers = getattr(cache, "layers", None)
            if type(layers) is not list:
                return None
            found += (name, type(cache), len(layers))
        elif type(value) in (int, float, str):
            found += (name, type(value), value.hex() if type(value) is float else value)
        elif name not in parameters and not isinstance(value, torch.Tensor):
            found += (name, type(value))
        else:
            return None
    return tuple(found)


def is_passed_on(kwargs: dict[str, Any], name: str) -> bool:
    """Whether the argument, of a call that has `kinds`, is an object which no forward may read."""
    value = kwargs[name]
    is_cache = value is kwargs[cache_name(kwargs)]
    return value is not None and not is_cache and type(value) not in (torch.Tensor, bool, int, float, str)


def is_decode_step(kwargs: dict[str, Any]) -> bool:
    """Whether a call is for one more token of each row, with a cache."""
    tokens = kwargs.get(_tokens_name(kwargs))
    return (
        bool(cache_name(kwargs))
        and isinstance(tokens, torch.Tensor)
        and tokens.dim() >= 2
        and tokens.shape[1] == 1
    )


def _tokens_name(kwargs: dict[str, Any]) -> str:
    return next((name for name in _TOKENS if kwargs.get(name) is not None), "")


def fault(kwargs: dict[str, Any]) -> str:
    """Why a decode step has no `kinds`."""
    name, cache = _tokens_name(kwargs), kwargs[cache_name(kwargs)]
    if name != "input_ids":
        return f"its token is given as {name}"
    ids = kwargs["input_ids"]
    if ids.dim() != 2:
        return f"input_ids of {ids.dim()} dimensions"
    if type(getattr(cache, "layers", None)) is not list:
        return f"a cache without a list of layers ({type(cache).__name__})"
    for name, value in kwargs.items():
        if type(value) is torch.Tensor:
            if name in GROWING and value.dim() != 2:
                return f"{name} of {value.dim()} dimensions"
            if not all(each.startswith(_OURS) for each in value.__dict__):
                return f"{name} with attributes"
        elif value is not cache and value is not None and type(value) not in (bool, int, float, str):
            return f"{name} is given as a {type(value).__name__}"
    return f"on {ids.device.type}"


def dense(kwargs: dict[str, Any]) -> dict[str, Any]:
    """``kwargs`` with contiguous tensors: how a slice of a growing tensor lies is different at each step."""
    if all([type(value) is not torch.Tensor or value.is_contiguous() for value in kwargs.values()]):
        return kwargs
    made: dict[int, torch.Tensor] = {}
    return {
        name: made.setdefault(id(value), value.contiguous()) if type(value) is torch.Tensor else value
        for name, value in kwargs.items()
    }
