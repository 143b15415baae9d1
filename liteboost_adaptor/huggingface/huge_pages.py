"""Weights of bound models on huge pages: a decode step reads all of them, and a page of 4 KiB is soon read.

Loaded weights are mapped from their file, in pages that the processor looks up one by one. They are copied,
one after the other, to memory of their own for which the kernel is asked for pages of 2 MiB. Parameters stay
the objects they were, each with a storage of its own; `undo` leaves them where they are.
"""

from __future__ import annotations

import ctypes
import fnmatch
import mmap
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch

from ..config import Settings
from ..memory import available_bytes
from ..report import APPLIED, DISABLED, IDLE, Outcome, report

RULE = "weights.huge_pages"
TITLE = "Weights on huge pages"
LEVEL = 2

PAGE = 2 << 20
#: Bytes of the smallest weight that is moved.
LEAST = PAGE
#: What must be free when all is moved; the pages of the file can be given up, but not at once.
SPARE = 1 << 30
_KERNEL = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PAGES = Path("/proc/self/pagemap")


class _Memory(mmap.mmap):
    """Anonymous memory; a storage holds it, and it goes with the storage."""


#: By the address of the weight in it.
_held: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()
_outcomes: weakref.WeakKeyDictionary[torch.nn.Module, Outcome] = weakref.WeakKeyDictionary()


def consider(model: torch.nn.Module, settings: Settings) -> None:
    """Move the weights of a bound ``model`` to huge pages, where that helps and there is room."""
    forget(model)
    weights = [] if _turned_off(settings) else list(_movable(model))
    missing = [weight for weight in weights if weight.data_ptr() not in _held]
    wanted = sum(weight.nbytes for weight in missing)
    if not weights or not _kernel_has_them():
        return
    if wanted and wanted + SPARE > available_bytes():
        reason = f"{wanted >> 20} MiB of weights stay where they are: memory is short"
        _note(model, Outcome(RULE, IDLE, type(model).__qualname__, reason))
        return
    for weight in missing:
        with torch.inference_mode(False), torch.no_grad():
            former, weight.data = weight.data, moved(weight.data)
            _let_go(former)
    total = sum(weight.nbytes for weight in weights)
    _note(
        model,
        Outcome(RULE, APPLIED, type(model).__qualname__, f"{len(weights)} weights, {total >> 20} MiB"),
    )


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of ``tensor`` on huge pages, as far as the kernel has some."""
    # More addresses than are used: the first huge page starts at the first multiple of its size.
    memory = _Memory(-1, tensor.nbytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    offset = -first % PAGE
    # Whole pages only: the rest of the last one would be memory nobody needs.
    if tensor.nbytes >= PAGE:
        memory.madvise(mmap.MADV_HUGEPAGE, offset, tensor.nbytes // PAGE * PAGE)
    made = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
    _held[first + offset] = memory
    return made.view(tensor.shape).copy_(tensor)


def _let_go(mapped: torch.Tensor) -> None:
    """Take the pages of a mapped file out of this process: a small weight may keep it mapped.

    Only where each is still the file's, which gives it again to whoever reads it.
    """
    size = mmap.PAGESIZE
    first, end = -(-mapped.data_ptr() // size), (mapped.data_ptr() + mapped.nbytes) // size
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


def forget(model: torch.nn.Module) -> None:
    """Take back what was reported of ``model`` and of bound models in it."""
    for part in model.modules():
        outcome = _outcomes.pop(part, None)
        if outcome is not None:
            report.remove(outcome)


def rows(settings: Settings) -> Iterator[tuple[str, str, str]]:
    """(id, title, state when no model has such weights)."""
    yield RULE, TITLE, DISABLED if _turned_off(settings) else IDLE


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


def _is_alone(weight: torch.nn.Parameter) -> bool:
    if weight.device.type != "cpu" or weight.layout is not torch.strided or weight.nbytes < LEAST:
        return False
    if not weight.is_contiguous() or weight.is_inference() or weight.is_shared() or weight.is_pinned():
        return False
    storage = weight.untyped_storage()
    # The weight and the object asked about it.
    return storage.nbytes() == weight.nbytes and torch._C._storage_Use_Count(storage._cdata) == 2


def _kernel_has_them() -> bool:
    try:
        return hasattr(mmap, "MADV_HUGEPAGE") and "[never]" not in _KERNEL.read_text()
    except OSError:
        return False


def _turned_off(settings: Settings) -> bool:
    is_disabled = any(fnmatch.fnmatchcase(RULE, glob) for glob in settings.disable)
    return is_disabled or settings.level < LEVEL
