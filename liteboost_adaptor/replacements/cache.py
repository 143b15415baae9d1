"""A KV cache that appends in place: room behind what is written, instead of a copy of it for each token.

What a layer keeps (``layer.keys``) stays an ordinary tensor with the values and the shape it would have; it
is a view of memory that holds more positions. What has once been handed out is never written again while
anybody else can see it: a layer that was cropped, or whose tensors were exchanged, goes on in new memory,
unless nobody else holds the old.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..report import Tally
from .guards import unserved

#: Where a layer keeps its rooms: no part of its state.
ROOMS = "_liteboost_rooms"
#: Least positions of space behind what is kept; beyond it half as many as there are (geometric growth).
LEAST_SPACE = 128


class Room:
    """Memory along one dimension, written up to ``end``.

    Attributes:
        memory: The tensor, ``capacity`` long along ``dim``; undefined behind ``end``.
        dim: Counted from the front.
        end: Positions that have ever been handed out end here.
    """

    __slots__ = ("__weakref__", "dim", "end", "memory")

    def __init__(self, like: torch.Tensor, dim: int, length: int) -> None:
        capacity = length + max(LEAST_SPACE, length // 2)
        self.dim, self.end = dim, 0
        # Not an inference tensor: a cache filled under inference_mode is used outside of it, too.
        with torch.inference_mode(False):
            self.memory = _empty(like, dim, capacity)
        _rooms.add(self)

    def start_of(self, held: torch.Tensor) -> int:
        """The position at which ``held`` begins, or -1 if it cannot be extended here."""
        memory, dim = self.memory, self.dim
        if held.dim() != memory.dim() or held.stride() != memory.stride() or held.dtype != memory.dtype:
            return -1
        storage = held.untyped_storage()
        if storage._cdata != memory.untyped_storage()._cdata:
            return -1
        if held.shape[:dim] != memory.shape[:dim] or held.shape[dim + 1 :] != memory.shape[dim + 1 :]:
            return -1
        start = (held.storage_offset() - memory.storage_offset()) // memory.stride(dim)
        end = start + held.size(dim)
        # Behind an earlier end lies what was handed out: it may be written again if nobody sees it.
        return start if end == self.end or (end < self.end and _users(storage) == _OWN_USERS) else -1

    def append(self, start: int, length: int, new: torch.Tensor) -> torch.Tensor:
        """Write ``new`` behind the ``length`` positions from ``start``, and give all of them."""
        dim, count = self.dim, new.size(self.dim)
        self.end = start + length + count
        self.memory.narrow(dim, start + length, count).copy_(new)
        return self.memory.narrow(dim, start, length + count)


#: Those alive, for the status.
_rooms: weakref.WeakSet[Room] = weakref.WeakSet()
#: A storage is held by a room's memory, by the layer's tensor, and by the object Python sees of it.
_OWN_USERS = 3


def bytes_held() -> int:
    """Bytes of space behind what all layers keep."""
    return sum(
        room.memory.nbytes // max(room.memory.size(room.dim), 1) * (room.memory.size(room.dim) - room.end)
        for room in list(_rooms)
    )


def _users(storage: torch.UntypedStorage) -> int:
    count = getattr(torch._C, "_storage_Use_Count", None)
    return count(storage._cdata) if count is not None else _OWN_USERS + 1


def _empty(like: torch.Tensor, dim: int, capacity: int) -> torch.Tensor:
    shape = list(like.shape)
    shape[dim] = capacity
    if like.device.type == "npu" and len(shape) == 4 and dim == 2:
        # Positions first, as the operators of CANN write and read them.
        batch, heads, _, size = shape
        return like.new_empty((batch, capacity, heads, size)).transpose(1, 2)
    return like.new_empty(shape)


def append(tally: Tally) -> Callable[[Any, str, torch.Tensor, int], torch.Tensor]:
    """``torch.cat([getattr(layer, name), new], dim)``, in place where it may be."""

    def call(layer: Any, name: str, new: torch.Tensor, dim: int) -> torch.Tensor:
        held = getattr(layer, name)
        reason = _unserved(held, new, dim)
        if reason:
            tally.fell_back(reason)
            return torch.cat([held, new], dim=dim)
        tally.served()
        dim %= new.dim()
        length = held.size(dim) if held.numel() else 0
        rooms = layer.__dict__.setdefault(ROOMS, {})
        room = rooms.get(name)
        start = -1
        if room is not None and length and room.dim == dim:
            start = room.start_of(held)
        if start < 0 or start + length + new.size(dim) > room.memory.size(dim):
            room = rooms[name] = Room(new, dim, length + new.size(dim))
            start = 0
            if length:
                room.append(0, 0, held)
        return room.append(start, length, new)

    return call


def _unserved(held: torch.Tensor, new: torch.Tensor, dim: int) -> str:
    if torch.compiler.is_compiling():
        return "torch.compile"
    reason = unserved(new, held)
    if reason:
        return reason
    if not (type(new) is type(held) is torch.Tensor):
        return "a traced tensor"
    if held.dtype != new.dtype:
        return "another dtype than what is kept"
    if held.numel() == 0 and held.dim() == 1:  # what transformers begins with
        return ""
    others = [size for at, size in enumerate(new.shape) if at != dim % new.dim()]
    if held.dim() != new.dim() or [s for at, s in enumerate(held.shape) if at != dim % held.dim()] != others:
        return "another shape than what is kept"
    return ""


def methods(original: type, update: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """What a cache layer's class gets beside its rerouted ``update``: nothing of ours is copied or saved."""

    def drop_rooms(name: str) -> Callable[..., Any]:
        inherited = getattr(original, name)

        def dropping(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return inherited(self, *args, **kwargs)
            finally:
                self.__dict__.pop(ROOMS, None)

        dropping.__name__, dropping.__doc__ = name, inherited.__doc__
        return dropping

    def __getstate__(self: Any) -> Any:
        state = original.__getstate__(self)
        rooms = self.__dict__.get(ROOMS)
        if not rooms or not isinstance(state, dict):
            return state
        # Only what is kept, without the space behind it.
        own = {name: _compact(state[name]) for name in rooms if isinstance(state.get(name), torch.Tensor)}
        return {name: value for name, value in {**state, **own}.items() if name != ROOMS}

    # Both let go of the tensors on the device: so must we.
    dropped = {name: drop_rooms(name) for name in ("offload", "reset") if hasattr(original, name)}
    return {**dropped, "__getstate__": __getstate__, "update": update}


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    is_whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if is_whole else tensor.clone(memory_format=torch.contiguous_format)
