"""Tensors in safetensors files, read by ``pread``: whole, or the part that a rank holds.

No file is mapped, so a page that was read never counts as memory of this process.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError

#: Names of dtypes in the files.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST_HEADER = 100_000_000
#: Of a tensor that is only gone through, how much is in memory.
_PIECE = 8 << 20


@dataclass
class Requests:
    """What has been asked of files: a sum over all threads."""

    bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, count: int) -> None:
        """Note a read."""
        with self._lock:
            self.bytes += count


#: Of this process.
requests = Requests()


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: ``first`` is its first byte."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class File:
    """A safetensors file. Its descriptor is closed with the last object that may read.

    Attributes:
        entries: Name -> tensor, in the order of the file.
        metadata: What else is in the header.

    Raises:
        CheckpointError: It is no safetensors file, or ends before its tensors do.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._descriptor = -1
        self._descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        size = os.fstat(self._descriptor).st_size
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        if size < 8 or not 2 <= length <= min(_MOST_HEADER, size - 8):
            raise CheckpointError(f"{self.path} is no safetensors file, or is cut short; copy it again")
        self.header = os.pread(self._descriptor, length, 8)
        requests.add(8 + length)
        try:
            found = json.loads(self.header)
            self.metadata: dict[str, str] = _metadata_of(found)
            self.entries = dict(
                sorted(
                    ((name, _entry_of(entry, 8 + length)) for name, entry in found.items()),
                    key=lambda item: item[1].first,
                )
            )
        except (ValueError, KeyError, TypeError, RecursionError) as fault:
            raise CheckpointError(
                f"the header of {self.path} cannot be read ({fault}); copy it again"
            ) from fault
        last = max((entry.first + entry.nbytes for entry in self.entries.values()), default=0)
        if last > size:
            raise CheckpointError(
                f"{self.path} is cut short: its tensors end at byte {last}, it at {size}. Copy it again."
            )

    def __copy__(self) -> File:
        return self  # a copy would close the same descriptor once more, whoever has it by then

    def __deepcopy__(self, memo: Any) -> File:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return File, (self.path,)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def fill(self, target: memoryview, first: int) -> None:
        """Read as many bytes as ``target`` has, from byte ``first`` on."""
        requests.add(len(target))
        done = 0
        while done < len(target):
            count = os.preadv(self._descriptor, [target[done:]], first + done)
            if not count:
                raise CheckpointError(f"{self.path} was cut short while it was read")
            done += count

    def advise(self, entry: Entry) -> None:
        """Say that most of a tensor is read next, in pieces."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, entry.first, entry.nbytes, os.POSIX_FADV_WILLNEED)


def _metadata_of(header: Any) -> dict[str, str]:
    """What is said of the whole file; taken out of its ``header``."""
    if not isinstance(header, dict):
        raise ValueError("it is no object")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(each, str) for each in metadata.values()):
        raise ValueError("its metadata are no names with texts")
    return metadata


def _entry_of(values: Any, start: int) -> Entry:
    """One tensor, of what a header says; data begin at byte ``start``."""
    shape, offsets = values["shape"], values["data_offsets"]
    numbers = [*shape, *offsets]
    if len(offsets) != 2 or not all(type(each) is int and each >= 0 for each in numbers):
        raise ValueError(f"a tensor has the shape {shape!r} and lies at {offsets!r}")
    entry = Entry(DTYPES[values["dtype"]], tuple(shape), start + offsets[0])
    if offsets[1] - offsets[0] != entry.nbytes:
        raise ValueError(f"{entry.nbytes} bytes of {entry.dtype} {shape} lie at {offsets}")
    return entry


@dataclass(frozen=True)
class Slice:
    """A tensor of a file, or a part of it; ``slice[...]`` reads it.

    Attributes:
        dim, ranges: The parts of one dimension that are read, or none: all of it.
        digest: SHA-256 of what is read; empty: not checked.
        whole: SHA-256 of the whole tensor, which is gone through before a part of it is read; empty: it is
            not.
    """

    file: File
    name: str
    dim: int = 0
    ranges: tuple[tuple[int, int], ...] | None = None
    digest: str = ""
    whole: str = ""

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor."""
        return self.file.entries[self.name].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is read."""
        whole = self.file.entries[self.name].shape
        if self.ranges is None:
            return whole
        length = sum(last - first for first, last in self.ranges)
        return (*whole[: self.dim], length, *whole[self.dim + 1 :])

    def get_shape(self) -> list[int]:
        """As safetensors' slices say it."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """As safetensors' slices say it."""
        return NAMES[self.dtype]

    def __getitem__(self, index: object) -> Tensor:
        """The tensor, in memory of its own; of what is read a further part.

        Raises:
            CheckpointError: The file ends too early, or holds something else than it was written with.
        """
        if self.whole and self._digest_of_whole() != self.whole:
            raise self._changed()
        result = torch.empty(self.shape, dtype=self.dtype)
        target = memory(result)
        done = 0
        for first, count in self._runs():
            self.file.fill(target[done : done + count], first)
            done += count
        if self.digest and hashlib.sha256(target).hexdigest() != self.digest:
            raise self._changed()
        return result if index is ... else result[index]

    def _changed(self) -> CheckpointError:
        return CheckpointError(
            f"{self.name} in {self.file.path} is not what was written there; copy the file again, or "
            "write the checkpoint again"
        )

    def _digest_of_whole(self) -> str:
        entry, digest = self.file.entries[self.name], hashlib.sha256()
        piece = memoryview(bytearray(min(_PIECE, entry.nbytes)))
        for done in range(0, entry.nbytes, _PIECE):
            read = piece[: entry.nbytes - done]
            self.file.fill(read, entry.first + done)
            digest.update(read)
        return digest.hexdigest()

    def _runs(self) -> Iterator[tuple[int, int]]:
        """(first byte, bytes) of what lies together in the file."""
        entry = self.file.entries[self.name]
        if self.ranges is None:
            yield entry.first, entry.nbytes
            return
        inner = math.prod(entry.shape[self.dim + 1 :]) * entry.dtype.itemsize
        outer = math.prod(entry.shape[: self.dim])
        if outer > 1:
            self.file.advise(entry)
        for index in range(outer):
            start = entry.first + index * entry.shape[self.dim] * inner
            for first, last in self.ranges:
                yield start + first * inner, (last - first) * inner


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is made of others when it is read; for loaders it is like a `Slice`.

    Attributes:
        make: Reads and makes it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    def get_shape(self) -> list[int]:
        """As safetensors' slices say it."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """As safetensors' slices say it."""
        return NAMES[self.dtype]

    def __getitem__(self, index: object) -> Tensor:
        """The tensor, in memory of its own; of what is made a further part."""
        result = self.make()
        return result if index is ... else result[index]


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor of the CPU."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
