"""What `generate` hands to a model's forward, as a runner makes it of the number of tokens alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import ExportError
from ..program.arguments import cache_name

IDS = "input_ids"
#: Argument -> its values for ``count`` tokens behind ``seen``; beside the tokens themselves.
_MADE: dict[str, Callable[[int, int], torch.Tensor]] = {
    "position_ids": lambda seen, count: torch.arange(seen, seen + count)[None],
    "cache_position": lambda seen, count: torch.arange(seen, seen + count),
    "attention_mask": lambda seen, count: torch.ones(1, seen + count, dtype=torch.long),
}
#: Those whose size along dimension 1 is another in every call.
GROWING = (IDS, "position_ids", "attention_mask")


def check(kwargs: dict[str, Any], seen: int) -> None:
    """See that a runner can make the arguments of a call of one sequence.

    Args:
        seen: How many tokens the cache holds.

    Raises:
        ExportError: It cannot.
    """
    ids = kwargs.get(IDS)
    if type(ids) is not torch.Tensor or ids.dim() != 2 or ids.shape[0] != 1 or ids.dtype != torch.long:
        raise ExportError(f"is given the tokens otherwise than as {IDS} [1, count]")
    cache = kwargs.get(cache_name(kwargs))
    if type(getattr(cache, "layers", None)) is not list:
        raise ExportError(
            f"is given a {type(cache).__name__} for a cache, and only one with a list of layers is exported"
        )
    for name, value in kwargs.items():
        if not isinstance(value, torch.Tensor) or name == IDS:
            continue
        made = _MADE.get(name)
        if made is None:
            raise ExportError(f"is given {name}, a tensor that no runner makes")
        expected = made(seen, ids.shape[1])
        if value.dtype != expected.dtype or not torch.equal(value.cpu(), expected):
            raise ExportError(
                f"is given {name} with other values than those that follow from the number of tokens"
            )


def size(name: str, dim: int, seen: int, count: int) -> int:
    """The size of an argument along ``dim``."""
    if name == IDS:
        return (1, count)[dim]
    return _MADE[name](seen, count).size(dim)
