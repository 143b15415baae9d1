"""A KV cache that appends in place: space behind what is written, instead of a copy of it for each token.

What a layer keeps (``layer.keys``) stays an ordinary tensor with the values and the shape it would have; it
is a view of memory that holds more positions. What has once been handed out is never written again while
anybody else can see it: a layer that was cropped, or whose tensors were exchanged, goes on in new memory,
unless nobody else holds the old.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..eligibility import unserved, widens
from ..report import CallCounter
from ..watch import Watch, place_in_class, place_in_module

ops = torch.ops.liteboost

#: Where a layer keeps its buffers: no part of its state.
BUFFERS = "_liteboost_buffers"
#: Least positions of space behind what is kept; beyond it half as many as there are (geometric growth).
LEAST_SPACE = 128


class KVBuffer:
    """Memory along one dimension, written up to ``end``, for one tensor of one layer.

    Attributes:
        memory: The tensor, ``capacity`` long along ``dim``, zero behind ``end``.
        dim: Counted from the front.
        end: Positions that have ever been handed out end here.
        in_inference_mode: Whether the last append was made under ``torch.inference_mode``: a concatenation
            there makes an inference tensor, so what is copied out of the memory becomes one.
    """

    __slots__ = ("__weakref__", "_layer", "dim", "end", "in_inference_mode", "memory")

    def __init__(self, layer: Any, like: torch.Tensor, dim: int, length: int) -> None:
        self.dim, self.end, self.in_inference_mode = dim, 0, False
        self._layer = weakref.ref(layer)
        # Not an inference tensor: a cache filled under inference_mode is used outside of it, too.
        with torch.inference_mode(False), torch.no_grad():
            # Heads first on every device: what views keys as [batch * heads, ...] may go on doing so.
            sizes = (*like.shape[:dim], _capacity(length), *like.shape[dim + 1 :])
            self.memory = like.new_zeros(math.prod(sizes) + _tail(layer, sizes, dim, like.device))
            self.memory.resize_(sizes)  # its storage stays as long as it is
        _alive.add(self)

    def start_of(self, layer: Any, held: torch.Tensor) -> int:
        """The position at which ``held``, kept by ``layer``, begins, or -1 if it cannot be extended here."""
        if self._layer() is not layer:
            return -1
        # What has been handed out behind it may be written again if nobody sees it.
        return ops._cache_start(held, self.memory, self.dim, self.end)

    def shows(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a part of this memory, or a copy that a write has made of one."""
        memory = self.memory
        if type(tensor) is not torch.Tensor or tensor.dtype != memory.dtype or tensor.device != memory.device:
            return False
        address = torch._C._data_address  # type: ignore[attr-defined] # not in torch's stub
        if address(tensor) == address(memory):
            return True
        is_laid_out_so = tensor.stride() == memory.stride() and not tensor.is_contiguous()
        size = memory.untyped_storage().nbytes()
        return is_laid_out_so and tensor.untyped_storage().nbytes() == size

    def fits(self, length: int) -> bool:
        """Whether ``length`` positions fit, and not far too much of it."""
        return self.memory.size(self.dim) <= 2 * _capacity(length)

    def takes(self, layer: Any, held: torch.Tensor, count: int) -> bool:
        """Whether ``count`` positions behind ``held``, kept by ``layer``, are written where it lies."""
        start, length = self.start_of(layer, held), held.size(self.dim)
        return start >= 0 and start + length + count <= self.memory.size(self.dim) and self.fits(length)

    def take_back(self, layer: Any, held: torch.Tensor) -> bool:
        """Whether positions behind ``held``, kept by ``layer``, were handed out, and nobody sees them now.

        They are written to next, as if they had not been.
        """
        start = self.start_of(layer, held)
        end = start + held.size(self.dim)
        if start < 0 or end == self.end:
            return False
        self.end = end
        return True

    def append(self, start: int, length: int, new: torch.Tensor) -> torch.Tensor:
        """Write ``new`` behind the ``length`` positions from ``start``, and give all of them."""
        self.extend_to(start + length + new.size(self.dim))
        return ops._cache_append(self.memory, new, self.dim, start, length)

    def extend_to(self, end: int) -> None:
        """Note that positions up to ``end`` are written, in the mode of this thread."""
        self.end, self.in_inference_mode = end, torch.is_inference_mode_enabled()

    def copy(self, view: torch.Tensor) -> torch.Tensor:
        """``view``, which this memory shows, as the concatenation would have made it."""
        with torch.inference_mode(self.in_inference_mode), torch.no_grad():
            return view.clone(memory_format=torch.contiguous_format)


class Prompt:
    """Stands among the buffers of a layer for what it keeps behind a prompt: not appended to yet.

    No named tuple: what makes one is code that a step which is recorded may not run.

    Attributes:
        storage: Address of the storage.
        dim: Along which the next append will be, counted from the front.
    """

    __slots__ = ("dim", "storage")

    def __init__(self, storage: int, dim: int) -> None:
        self.storage, self.dim = storage, dim


#: Those alive, for the status.
_alive: weakref.WeakSet[KVBuffer] = weakref.WeakSet()


def bytes_held() -> int:
    """Bytes of space behind what all layers keep."""
    space = 0
    for buffer in list(_alive):
        capacity = buffer.memory.size(buffer.dim)
        space += buffer.memory.untyped_storage().nbytes()
        space -= buffer.memory.nbytes // max(capacity, 1) * buffer.end
    return space


def _capacity(length: int) -> int:
    return length + max(LEAST_SPACE, length // 2)


def _tail(layer: Any, sizes: tuple[int, ...], dim: int, device: torch.device) -> int:
    """Elements behind a memory of ``sizes``: as many as lie before what an NPU reads of it, at most.

    Its attention reads memory from the first position that counts on, as far as if that were position 0. In
    a sliding window that is another one for each token.
    """
    slides = device.type == "npu" and getattr(layer, "is_sliding", False) is True
    return math.prod(sizes[dim:]) if slides else 0


_recording = threading.local()


@contextmanager
def recorded_by(recorder: Any) -> Iterator[None]:
    """In this thread, ``recorder.append(held, layer, name, new, dim)`` stands for every append."""
    _recording.recorder = recorder
    try:
        yield
    finally:
        del _recording.recorder


def recorder() -> Any:
    """What records the step that this thread makes, or ``None``."""
    return getattr(_recording, "recorder", None)


def is_recorded() -> bool:
    """Whether this thread records a step."""
    return recorder() is not None


def append(counter: CallCounter) -> Callable[[torch.Tensor, Any, str, torch.Tensor, int], torch.Tensor]:
    """``torch.cat([held, new], dim)`` for the ``held`` of ``layer.name``, in place where it may be."""
    concatenation = place_in_module(vars(torch), "cat")
    watch = Watch([concatenation, place_in_class(torch.Tensor, "__torch_function__")])
    ask = watch.ask

    def call(held: torch.Tensor, layer: Any, name: str, new: torch.Tensor, dim: int) -> torch.Tensor:
        # As it is promoted: products under autocast, in the cache of a model in fp32.
        added = new.float() if held.dtype != new.dtype and widens(held, new) else new
        if (recording := recorder()) is not None:
            counter.count_served()
            return recording.append(held, layer, name, added, dim % new.dim())
        reason = _unserved(held, added, dim) or ask()
        if reason:
            counter.count_fallback(reason)
            layer.__dict__.get(BUFFERS, {}).pop(name, None)
            return torch.cat([held, new], dim=dim)
        counter.count_served()
        return grown(held, layer, name, added, dim % new.dim())

    vars(call)["watch"] = watch  # who asks has to keep it
    return call


def grown(held: torch.Tensor, layer: Any, name: str, new: torch.Tensor, dim: int) -> torch.Tensor:
    """``new`` behind the ``held`` of ``layer.name``, in place where it is the last of what was handed out."""
    buffers = layer.__dict__.setdefault(BUFFERS, {})
    result = in_place(layer, buffers, held, name, new, dim)
    if result is None:
        # Once is a copy of what comes first; what is kept of it and appended to again gets a buffer.
        result = torch.cat([held, new], dim=dim)
        buffers[name] = Prompt(result.untyped_storage()._cdata, dim)
    return result


def in_place(
    layer: Any,
    buffers: dict[str, KVBuffer | Prompt],
    held: torch.Tensor,
    name: str,
    new: torch.Tensor,
    dim: int,
) -> torch.Tensor | None:
    """``new`` behind ``held``, or ``None`` where ``held`` is not what the last append to it has left."""
    if held.dim() != new.dim() or not held.numel() or not new.numel():
        return None
    length, noted = held.size(dim), buffers.get(name)
    if isinstance(noted, KVBuffer):
        start = noted.start_of(layer, held) if noted.dim == dim else -1
        if start < 0:
            return None
        if start + length + new.size(dim) <= noted.memory.size(dim) and noted.fits(length):
            return noted.append(start, length, new)
    elif noted is None or noted.storage != held.untyped_storage()._cdata:
        return None
    buffer = buffers[name] = KVBuffer(layer, new, dim, length + new.size(dim))
    buffer.append(0, 0, held)
    return buffer.append(0, length, new)


def make_room(layer: Any) -> bool:
    """Move what ``layer`` keeps behind a prompt to where one position more fits, as the next append would.

    Returns:
        Whether there was such a thing.
    """
    own = vars(layer)
    mine = own.get(BUFFERS, {})
    moved = False
    for name, noted in mine.items():
        held = own.get(name)
        if not isinstance(noted, Prompt) or type(held) is not torch.Tensor or not held.numel():
            continue
        if noted.storage == held.untyped_storage()._cdata and not unserved(held, casts=True):
            buffer = mine[name] = KVBuffer(layer, held, noted.dim, held.size(noted.dim) + 1)
            own[name] = buffer.append(0, 0, held)
            moved = True
    return moved


def _unserved(held: torch.Tensor, new: torch.Tensor, dim: int) -> str:
    if torch.compiler.is_compiling():
        return "torch.compile"
    if not hasattr(ops, "_cache_append"):
        return "no compiled kernels"
    reason = unserved(new, held, casts=True)
    if reason:
        return reason
    if not (type(new) is type(held) is torch.Tensor):
        return "a traced tensor"
    if held.dtype != new.dtype:
        return "another dtype than what is kept"
    if held.numel() == 0 and held.dim() == 1:  # what transformers begins with
        return ""
    at, kept, added = dim % new.dim(), held.shape, new.shape
    if len(kept) != len(added) or kept[:at] != added[:at] or kept[at + 1 :] != added[at + 1 :]:
        return "another shape than what is kept"
    return ""
