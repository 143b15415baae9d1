"""Proves that the sanitizers see: what was planted, and found.

``python -m fuzz.sanitizer_faults BUILD_FOLDER`` prints it.
Each fault of `tests/csrc/planted_faults.cpp` is committed in a child of this process, on torch's own tensors,
at every instruction set of this CPU, next to the same call without a fault, which must end well.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

OUT_OF_BOUNDS = "AddressSanitizer: heap-buffer-overflow"
AFTER_FREE = "AddressSanitizer: heap-use-after-free"
#: Elements of the tensors: neither a multiple of a vector nor of 8 bytes.
SIZE = 37


class Planted:
    """The functions of one library."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        pointer, whole = ctypes.c_void_p, ctypes.c_int64

        def function(name: str, result: type | None, *arguments: type) -> Callable:
            found = library[f"planted_{name}"]
            found.restype, found.argtypes = result, arguments
            return found

        self.read = function("read", ctypes.c_float, pointer, whole)
        self.write = function("write", None, pointer, whole)
        self.read_tail = {
            torch.float32: function("tail_read_f32", ctypes.c_float, pointer, ctypes.c_int),
            torch.bfloat16: function("tail_read_bf16", ctypes.c_float, pointer, ctypes.c_int),
        }
        self.write_tail = {
            torch.float32: function("tail_write_f32", None, pointer, ctypes.c_int),
            torch.bfloat16: function("tail_write_bf16", None, pointer, ctypes.c_int),
        }
        self.add = function("add", whole, whole, whole)
        self.uninitialised = function("uninitialised", ctypes.c_float)


#: Tensors that the calls have only the address of.
kept: list[torch.Tensor] = []


def faults(lib: Planted) -> dict[str, tuple[Callable[[], object], Callable[[], object], str]]:
    """Name -> the call without a fault, the one with it, and what the report must say of that."""
    x = torch.ones(SIZE)
    kept.append(x)
    freed = torch.ones(SIZE).data_ptr()  # the tensor is gone
    start, last = x.data_ptr(), SIZE - 1
    ends = torch.iinfo(torch.int64).max
    found = {
        "read beyond the end": (lambda: lib.read(start, last), lambda: lib.read(start, SIZE), OUT_OF_BOUNDS),
        "read before the start": (lambda: lib.read(start, 0), lambda: lib.read(start, -1), OUT_OF_BOUNDS),
        "write beyond the end": (
            lambda: lib.write(start, last),
            lambda: lib.write(start, SIZE),
            OUT_OF_BOUNDS,
        ),
        "use after free": (lambda: lib.read(start, 0), lambda: lib.read(freed, 0), AFTER_FREE),
        "signed overflow": (lambda: lib.add(ends, 0), lambda: lib.add(ends, 1), "signed integer overflow"),
        "misaligned read": (
            lambda: lib.read(start + 4, 0),
            lambda: lib.read(start + 2, 0),
            "misaligned address",
        ),
    }
    for dtype in (torch.float32, torch.bfloat16):
        y = torch.ones(SIZE, dtype=dtype)
        kept.append(y)
        name, end = str(dtype).removeprefix("torch."), y.data_ptr() + y.nbytes
        read, write = lib.read_tail[dtype], lib.write_tail[dtype]
        # Two elements: the last of the tensor and the one behind it. Bound now, not when they are called.
        for word, call in (("read", read), ("write", write)):
            found[f"{name} tail {word} beyond the end"] = (
                lambda call=call, end=end, y=y: call(end - 2 * y.element_size(), 2),
                lambda call=call, end=end, y=y: call(end - y.element_size(), 2),
                OUT_OF_BOUNDS,
            )
    return found


def commit(action: Callable[[], object]) -> tuple[int, str]:
    """Exit status and error output of a child that does ``action``."""
    with tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            os.dup2(errors.fileno(), 2)
            action()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        errors.seek(0)
        return os.waitstatus_to_exitcode(status), errors.read().decode(errors="replace")


def main(folder: str) -> None:
    torch.ops.load_library(f"{folder}/_C.so")
    found = []
    for isa in torch.ops.liteboost._isas():
        lib = Planted(Path(folder) / "csrc" / f"libplanted_faults_{isa}.so")
        if not math.isnan(lib.uninitialised()):
            sys.exit(f"{isa}: memory from malloc is not filled with NaN")
        if not torch.ops.liteboost.rms_norm(torch.ones(SIZE), None, 1e-6).isfinite().all():
            sys.exit(f"{isa}: a sound call gives NaN")
        for name, (sound, faulty, report) in faults(lib).items():
            status, errors = commit(sound)
            if status or errors:
                sys.exit(f"{isa}: {name}: the call without a fault ended with {status}:\n{errors}")
            status, errors = commit(faulty)
            if not status or report not in errors:
                sys.exit(f"{isa}: {name} was not found; it ended with {status}:\n{errors}")
            found.append(f"{name} ({isa})")
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
