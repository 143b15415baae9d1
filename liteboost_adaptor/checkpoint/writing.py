"""Safetensors files written tensor by tensor: no more than one of them is in memory."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError
from .files import NAMES, memory

#: As the library orders tensors of several dtypes, the last first.
_ORDER = (
    *("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "I16", "F16", "BF16", "I32", "F32", "C64", "F64", "I64"),
)
_ALIGNED = 8


class Writer:
    """Writes one file, byte for byte as the library would. It has its name once `close` was called.

    Args:
        entries: Name -> (dtype, shape) of all tensors.
    """

    def __init__(
        self,
        path: Path,
        entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        metadata: dict[str, str] | None = None,
    ) -> None:
        self.path = path
        self._partial = path.with_name(f".{path.name}.partial")
        self._places: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = {}
        self._header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
        first = 0
        for name in sorted(entries, key=lambda name: (-_ORDER.index(NAMES[entries[name][0]]), name)):
            dtype, shape = entries[name]
            last = first + math.prod(shape) * dtype.itemsize
            self._header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [first, last]}
            self._places[name] = first, dtype, shape
            first = last
        text = self._text()
        self._start = 8 + len(text)
        self.size = self._start + first
        self._file = open(self._partial, "wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self.size)

    def _text(self) -> bytes:
        text = json.dumps(self._header, separators=(",", ":"), ensure_ascii=False).encode()
        return text + b" " * (-len(text) % _ALIGNED)

    def say(self, metadata: dict[str, str]) -> None:
        """Put other metadata, as long as that the file was begun with, in its place."""
        self._header["__metadata__"] = metadata
        text = self._text()
        assert 8 + len(text) == self._start, "room for other metadata"
        self._file.seek(8)
        self._file.write(text)

    def put(self, name: str, tensor: Tensor) -> None:
        """Write one tensor.

        Raises:
            CheckpointError: It is not what the header says.
        """
        first, dtype, shape = self._places.pop(name)
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, and {self.path} has room for {dtype} "
                f"{list(shape)}"
            )
        self._file.seek(self._start + first)
        self._file.write(memory(tensor.detach().cpu().contiguous()))

    def close(self) -> None:
        """Give the file its name; from then on it is whole.

        Raises:
            CheckpointError: A tensor is not there.
        """
        if self._places:
            self.discard()
            raise CheckpointError(f"{', '.join(list(self._places)[:3])} was not written to {self.path}")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._partial, self.path)

    def discard(self) -> None:
        """Leave nothing behind, also where the disk is full."""
        with contextlib.suppress(OSError):  # of what was not written yet
            self._file.close()
        self._partial.unlink(missing_ok=True)
