"""One call of a model's forward for more tokens, and whether its cache is one that a program appends to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..kv_cache import buffers
from ..kv_cache.layers import served, using
from . import arguments
from .arguments import cache_name
from .caches import appended_layers


def _nothing() -> list[torch.Tensor]:
    return []


@dataclass(frozen=True)
class StepCall:
    """What a model was called with, and what a program for it is given.

    Attributes:
        call: The original.
        kwargs: Its arguments.
        given: Those of a program: see `arguments.flat` and `arguments.dense`.
        key: What of them must be the same for a program to serve them.
        is_copied: Whether some of ``given`` are copies of those of the caller.
        growing: See `Recorder.input`; None: what `arguments.growing` says.
        unread: See `Attempt`.
        kept: Copies of what the call has written beside its result and what the cache's layers keep.
    """

    call: Callable[..., Any]
    kwargs: dict[str, Any]
    given: dict[str, Any]
    key: Any
    is_copied: bool = False
    growing: Mapping[str, Sequence[int] | None] | None = None
    unread: Collection[str] = ()
    kept: Callable[[], list[torch.Tensor]] = _nothing

    @property
    def cache(self) -> Any:
        return self.kwargs[cache_name(self.kwargs)]

    @property
    def count(self) -> int:
        """How many new tokens a row has."""
        return int(arguments.tokens(self.given).shape[1])

    def grown(self) -> Mapping[str, Sequence[int] | None]:
        """Along which dimensions which argument has another size in every run: see `Recorder.input`."""
        return arguments.growing(self.given) if self.growing is None else self.growing

    def original(self) -> Any:
        """The result of the original."""
        return self.call(**self.kwargs)


def _layers(cache: Any) -> list[Any]:
    return appended_layers(cache) or []


def has_buffers(cache: Any) -> bool:
    return all(isinstance(buffer, buffers.KVBuffer) for _, _, buffer in buffers_in(cache))


def makes_room(cache: Any) -> bool:
    """Whether ``cache`` was as its prompt has left it, and can be appended to in place from now on."""
    with using():
        return any([buffers.make_room(layer) for layer in _layers(cache) if served(layer) is not None])


def takes_back(cache: Any) -> bool:
    """Whether ``cache`` was cropped, and is written to next where it was before."""
    with using():
        return any(
            [
                buffer.take_back(layer, held)
                for layer, held, buffer in buffers_in(cache)
                if isinstance(buffer, buffers.KVBuffer) and isinstance(held, torch.Tensor)
            ]
        )


def moves(cache: Any, grows: bool, count: int) -> bool:
    """Whether ``count`` more positions of each row do not fit where a layer of ``cache`` keeps the others.

    Args:
        grows: Whether such a cache has buffers: where it has none, beams have exchanged what it keeps.
    """
    found = buffers_in(cache)
    return (grows and not found) or any(
        isinstance(held, torch.Tensor) and not buffer.takes(layer, held, count)
        for layer, held, buffer in found
    )


def is_short(cache: Any) -> bool:
    """Whether a layer of ``cache`` keeps one position: lengths that are symbols are larger."""
    return any(
        isinstance(held, torch.Tensor) and held.size(buffer.dim) < 2 for _, held, buffer in buffers_in(cache)
    )


def coincides(step: StepCall, numbers: Collection[str]) -> bool:
    """Whether lengths that have nothing to do with each other are equal in a step of several tokens.

    They would have one symbol (`Symbols.of`), and the program serve no step where they are not.

    Args:
        numbers: Attributes of layers that count.
    """
    if step.count == 1 or step.growing is not None:
        return False
    found = [each for each in buffers_in(step.cache) if isinstance(each[1], torch.Tensor)]
    kept = {held.size(buffer.dim) for _, held, buffer in found}
    room = {buffer.memory.size(buffer.dim) for _, _, buffer in found}
    masks = (step.given.get(name) for name in arguments.GROWING)
    of_masks = {mask.shape[1] for mask in masks if isinstance(mask, torch.Tensor)}
    counted = {vars(layer).get(name) for layer, _, _ in found for name in numbers}
    return step.count in kept | room | of_masks | counted or not room.isdisjoint(kept | of_masks | counted)


def buffers_in(cache: Any) -> list[tuple[Any, Any, Any]]:
    """(layer, what it keeps, the buffer for it)."""
    return [
        (layer, own.get(name), buffer)
        for layer in _layers(cache)
        for own in (vars(layer),)
        for name, buffer in own.get(buffers.BUFFERS, {}).items()
    ]
