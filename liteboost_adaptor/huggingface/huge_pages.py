"""Weights of bound models on huge pages: a decode step reads all of them, and a page of 4 KiB is soon read.

Loaded weights are mapped from their file, in pages that the processor looks up one by one. They are copied,
one after the other, to memory of their own for which the kernel is asked for pages of 2 MiB. Parameters stay
the objects they were, each with a storage of its own; `undo` leaves them where they are.

Layers of integers (`QuantizedLinear`) have buffers that are smaller than such a page: they are moved
together, one behind the other.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch

from ..config import Settings, turned_off
from ..memory import available_bytes
from ..report import APPLIED, DISABLED, IDLE, Listed, Outcome, report
from . import caching_allocator

RULE = "weights.huge_pages"
TITLE = "Weights on huge pages"
LEVEL = 2

PAGE = 2 << 20
#: Bytes of the smallest weight that is moved.
LEAST = PAGE
#: Bytes of memory that buffers are put into together, and what each of them starts at a multiple of.
TOGETHER, ALIGNMENT = 64 << 20, 64
#: What must be free when all is moved; the pages of the file can be given up, but not at once.
SPARE = 1 << 30
_KERNEL = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PAGES = Path("/proc/self/pagemap")
_MAPS = Path("/proc/self/maps")


class _Memory(mmap.mmap):
    """Anonymous memory; a storage holds it, and it goes with the storage."""


#: By the address of the weight in it.
_held: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()
_outcomes: weakref.WeakKeyDictionary[torch.nn.Module, Outcome] = weakref.WeakKeyDictionary()


def bind(model: torch.nn.Module, settings: Settings) -> None:
    """Move the weights of a bound ``model`` to huge pages, where that helps and there is room."""
    unbind(model)
    weights = [] if turned_off(settings, LEVEL, RULE) else list(_movable(model))
    integers = [] if turned_off(settings, LEVEL, RULE) else list(_integers(model))
    missing = [weight for weight in weights if not _is_on_huge_pages(weight)]
    missing_integers = [buffer for buffer in integers if buffer.data_ptr() not in _held]
    wanted = sum(tensor.nbytes for tensor in missing + missing_integers)
    if not (weights or sum(buffer.nbytes for buffer in integers) >= LEAST) or not _kernel_has_them():
        return
    if wanted and wanted + SPARE > available_bytes():
        reason = f"{wanted >> 20} MiB of weights stay where they are: memory is short"
        _note(model, Outcome(RULE, IDLE, type(model).__qualname__, reason))
        return
    try:
        for weight in missing:
            with torch.inference_mode(False), torch.no_grad():
                former, weight.data = weight.data, moved(weight.data)
                _let_go(former)
        _move_together(missing_integers)
    except (OSError, MemoryError) as fault:
        # Each tensor is whole, where it was or on huge pages: what did not move is only slower to read.
        reason = f"some weights stay where they are: {fault or 'memory is short'}"
        _note(model, Outcome(RULE, IDLE, type(model).__qualname__, reason))
        return
    total = sum(tensor.nbytes for tensor in weights + integers)
    _note(
        model,
        Outcome(
            RULE,
            APPLIED,
            type(model).__qualname__,
            f"{len(weights) + len(integers)} weights, {total >> 20} MiB",
        ),
    )


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of ``tensor`` on huge pages, as far as the kernel has some."""
    return _copied(tensor, *_mapped(tensor.nbytes))


def zeros(nbytes: int) -> torch.Tensor:
    """Bytes that are zero, on huge pages where the kernel has some, and take memory where they are used."""
    memory, offset = _mapped(nbytes, is_huge=_kernel_has_them())
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset)


def _move_together(tensors: list[torch.Tensor]) -> None:
    """Copy each to the place behind the one before it."""
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    memory, offset, end = None, 0, 0
    for i, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        if offset + size > end:
            _trim()
            together = _fitting(sizes[i:])
            memory, offset = _mapped(together)
            end = offset + together
        with torch.inference_mode(False), torch.no_grad():
            tensor.data = _copied(tensor, memory, offset)
        offset += size
    if tensors:
        _trim()


def _fitting(sizes: list[int]) -> int:
    """Bytes of the first of ``sizes`` and as many behind it as belong together."""
    total = sizes[0]
    for size in sizes[1:]:
        if total + size > TOGETHER:
            break
        total += size
    return total


def _mapped(nbytes: int, is_huge: bool = True) -> tuple[_Memory, int]:
    """New memory, and where in it ``nbytes`` begin that are on huge pages, but for the rest of the last."""
    # More addresses than are used: the first huge page starts at the first multiple of its size.
    memory = _Memory(-1, nbytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    offset = -_address(memory) % PAGE
    # Whole pages only: the rest of the last one would be memory nobody needs.
    if nbytes >= PAGE and is_huge:
        memory.madvise(mmap.MADV_HUGEPAGE, offset, nbytes // PAGE * PAGE)
    return memory, offset


def _address(memory: _Memory) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _copied(tensor: torch.Tensor, memory: _Memory, offset: int) -> torch.Tensor:
    made = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
    _held[_address(memory) + offset] = memory
    return made.view(tensor.shape).copy_(tensor)


def _trim() -> None:
    """Give back what the allocator keeps of freed memory between other memory, where it is glibc's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _let_go(mapped: torch.Tensor) -> None:
    """Take the pages of a mapped file out of this process: a small weight may keep it mapped.

    Only where each is still the file's, which gives it again to whoever reads it.
    """
    size = mmap.PAGESIZE
    first, end = -(-mapped.data_ptr() // size), (mapped.data_ptr() + mapped.nbytes) // size
    if end <= first:
        return
    try:
        with _PAGES.open("rb", buffering=0) as pages:
            pages.seek(8 * first)
            states = torch.frombuffer(bytearray(pages.read(8 * (end - first))), dtype=torch.int64)
    except OSError:
        return
    # The kernel's admin-guide/mm/pagemap: bit 63, the sign, is for present, 62 for swapped, 61 for of a file.
    is_of_file = (states >> 61) & 1 == 1
    is_absent = (states >= 0) & ((states >> 62) & 1 == 0)
    if len(states) == end - first and bool((is_of_file | is_absent).all()):
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first * size), ctypes.c_size_t((end - first) * size), mmap.MADV_DONTNEED
        )


def unbind(model: torch.nn.Module) -> None:
    """Take back what was reported of ``model`` and of bound models in it."""
    for part in model.modules():
        outcome = _outcomes.pop(part, None)
        if outcome is not None:
            report.remove(outcome)


def rows(settings: Settings) -> Iterator[Listed]:
    """Its row."""
    reason = turned_off(settings, LEVEL, RULE)
    yield Listed(RULE, TITLE, DISABLED if reason else IDLE, reason)


def _note(model: torch.nn.Module, outcome: Outcome) -> None:
    report.add(outcome)
    _outcomes[model] = outcome


def _movable(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Large weights that are read whole, in ordinary memory that nobody else holds."""
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            continue  # A row of it is read; a head that is tied to it comes by itself.
        for weight in module._parameters.values():
            if type(weight) is torch.nn.Parameter and id(weight) not in seen and _is_alone(weight):
                seen.add(id(weight))
                yield weight


def _integers(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The buffers of quantized layers, all of which are read whole, in the order of the layers."""
    for module in model.modules():
        if getattr(module, "holds_integers", False):
            for buffer in module._buffers.values():
                if buffer is not None and buffer.nbytes and _is_alone(buffer, least=1):
                    yield buffer


def _is_alone(weight: torch.Tensor, least: int = 0) -> bool:
    if weight.device.type != "cpu" or weight.layout is not torch.strided or weight.nbytes < (least or LEAST):
        return False
    if not weight.is_contiguous() or weight.is_inference() or weight.is_shared() or weight.is_pinned():
        return False
    is_whole = weight.untyped_storage().nbytes() == weight.nbytes
    is_unshared = _holders(weight) == _least_holders()
    return is_whole and is_unshared and (weight.data_ptr() in _held or _is_torchs_own(weight))


def _is_on_huge_pages(weight: torch.Tensor) -> bool:
    """Whether a large weight was moved before, or is from memory that is kept when it is freed.

    That has huge pages as far as it fills them, as a weight has that is moved.
    """
    return weight.data_ptr() in _held or caching_allocator.is_deleter(torch.ops.liteboost._deleter_of(weight))


def _holders(tensor: torch.Tensor) -> tuple[int, int]:
    """How many tensors hold the storage of ``tensor``, and how many references there are to its object.

    Whoever asks for a storage is given the same object: it counts once, however many have it.
    """
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


@functools.cache
def _least_holders() -> tuple[int, int]:
    """`_holders` of a tensor that nobody else knows."""
    return _holders(torch.empty(8, dtype=torch.uint8, device="cpu"))


def _is_torchs_own(weight: torch.Tensor) -> bool:
    """Whether nobody outside of torch can reach the memory of ``weight``, as who has lent it could.

    It is what torch allocates for itself, or a part of a mapped file as safetensors makes one: a slice of a
    storage, over pages of its own. NumPy, DLPack and `from_blob` lend theirs, with a function that gives it
    back; what is written to such an array later has to reach the weight.
    """
    if not hasattr(torch.ops.liteboost, "_deleter_of"):
        return False
    own, of_slices = _deleters()
    deleter = torch.ops.liteboost._deleter_of(weight)
    if deleter == own or caching_allocator.is_deleter(deleter):
        return True
    return deleter == of_slices and _is_privately_mapped(weight.data_ptr())


@functools.cache
def _deleters() -> tuple[int, int]:
    """By what torch frees memory of its own, and slices of storages."""
    own = torch.empty(8, dtype=torch.uint8, device="cpu")
    part = torch.empty(0, dtype=torch.uint8, device="cpu").set_(own.untyped_storage()[2:6])
    return torch.ops.liteboost._deleter_of(own), torch.ops.liteboost._deleter_of(part)


def _is_privately_mapped(address: int) -> bool:
    """Whether a file is mapped there in pages of this process alone."""
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        where, access, *_ = fields = line.split(maxsplit=5)
        first, _, end = where.partition("-")
        if int(first, 16) <= address < int(end, 16):
            return access[3] == "p" and len(fields) > 5 and fields[5].startswith("/")
    return False


def _kernel_has_them() -> bool:
    try:
        return hasattr(mmap, "MADV_HUGEPAGE") and "[never]" not in _KERNEL.read_text()
    except OSError:
        return False
