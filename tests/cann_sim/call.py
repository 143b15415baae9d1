"""Calls one operator of the simulated ``libopapi.so`` as a C program would, on tensors in host memory.

For tests of operators and of their limits: neither torch_npu nor a device takes part.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from .build import libraries
from .releases import SOCS

_DTYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.int8: 2,
    torch.int32: 3,
    torch.uint8: 4,
    torch.int16: 6,
    torch.int64: 9,
    torch.uint64: 10,
    torch.float64: 11,
    torch.bool: 12,
    torch.bfloat16: 27,
}
_ND, _FRACTAL_NZ = 2, 29
_NUMBERS = {
    "double": ctypes.c_double,
    "float": ctypes.c_float,
    "bool": ctypes.c_bool,
    "int8": ctypes.c_int8,
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "uint64": ctypes.c_uint64,
    "dtype": ctypes.c_int,
}


class Refused(RuntimeError):
    """An operator's error code and what ``aclGetRecentErrMsg`` said."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class Nz:
    """A matrix stored in FRACTAL_NZ; ``.t()`` is the same storage seen transposed.

    ``(..., r, c)`` lies as ``(..., c / width, r / 16, 16, width)``, a row of a block being 32 bytes.
    """

    def __init__(self, values: torch.Tensor, transposed: bool = False, storage: torch.Tensor | None = None):
        self.values, self.transposed = values, transposed
        self.storage = _blocks(values) if storage is None else storage

    def t(self) -> Nz:
        return Nz(self.values, not self.transposed, self.storage)

    @property
    def view(self) -> torch.Tensor:
        return self.values.transpose(-1, -2) if self.transposed else self.values


def _blocks(values: torch.Tensor) -> torch.Tensor:
    width = 32 // values.element_size()
    rows, columns = values.shape[-2:]
    padded = torch.nn.functional.pad(values, (0, -columns % width, 0, -rows % 16))
    split = padded.unflatten(-1, (-1, width)).unflatten(-3, (-1, 16))
    return split.movedim(-2, -4).contiguous()


def call(name: str, *arguments: object) -> None:
    """Both phases of ``name``; outputs are written in place. Raises `Refused`."""
    library = _library(_chosen[-1])
    signature = library.simcann_signature(name.encode())
    if signature is None:
        raise LookupError(f"the simulated libopapi.so has no operator {name}")
    kinds = signature.decode().split(",")
    if len(kinds) != len(arguments):
        raise TypeError(f"{name} takes {len(kinds)} arguments ({', '.join(kinds)}), not {len(arguments)}")
    made: list[tuple[str, ctypes.c_void_p]] = []
    try:
        native = [_native(library, k, a, made) for k, a in zip(kinds, arguments, strict=True)]
        size, executor = ctypes.c_uint64(), ctypes.c_void_p()
        first = getattr(library, f"{name}GetWorkspaceSize")
        _check(first(*native, ctypes.byref(size), ctypes.byref(executor)))
        _check(getattr(library, name)(None, size, executor, None))
    finally:
        for destroy, handle in reversed(made):
            getattr(library, destroy)(handle)


@contextmanager
def on_soc(soc: str) -> Iterator[None]:
    """Calls inside go to a copy of the library that simulates this SoC, a key of `SOCS`."""
    variable = os.environ.get("SIMCANN_SOC")
    os.environ["SIMCANN_SOC"] = SOCS[soc]
    _chosen.append(soc)
    try:
        yield
    finally:
        _chosen.pop()
        if variable is None:
            del os.environ["SIMCANN_SOC"]
        else:
            os.environ["SIMCANN_SOC"] = variable


_chosen: list[str | None] = [None]


def folder() -> Path:
    """The simulator's libraries: those of the environment of this process, or the ones built."""
    given = [Path(f) for f in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if f]
    return next((f for f in given if (f / "libopapi.so").exists()), None) or libraries()


@functools.cache
def _library(soc: str | None) -> ctypes.CDLL:
    ctypes.CDLL(str(folder() / "libascendcl.so"))
    if soc is None:
        return _declared(ctypes.CDLL(str(folder() / "libopapi.so")))
    # A library reads the SoC once, at its first operator: a second copy, under another name, reads it anew.
    with tempfile.TemporaryDirectory() as place:
        return _declared(ctypes.CDLL(str(shutil.copy(folder() / "libopapi.so", Path(place) / f"{soc}.so"))))


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.simcann_signature.restype = ctypes.c_char_p
    makers = ("Tensor", "Scalar", "IntArray", "FloatArray", "BoolArray", "TensorList", "ScalarList")
    for maker in makers:
        getattr(library, f"aclCreate{maker}").restype = ctypes.c_void_p
    return library


def _check(code: int) -> None:
    if code:
        runtime = ctypes.CDLL(str(folder() / "libascendcl.so"))
        runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
        raise Refused(code, (runtime.aclGetRecentErrMsg() or b"").decode())


def _native(library: ctypes.CDLL, kind: str, argument: object, made: list) -> object:
    if kind in _NUMBERS:
        return _NUMBERS[kind](argument)
    if kind == "string":
        return ctypes.c_char_p(None if argument is None else str(argument).encode())
    if argument is None:
        return ctypes.c_void_p()
    if kind == "tensor":
        handle = ctypes.c_void_p(_tensor(library, argument))
        made.append(("aclDestroyTensor", handle))
    elif kind == "tensor_list":
        elements = [_tensor(library, t) for t in argument]
        array = (ctypes.c_void_p * len(elements))(*elements)
        handle = ctypes.c_void_p(library.aclCreateTensorList(array, ctypes.c_uint64(len(elements))))
        made.append(("aclDestroyTensorList", handle))  # and its elements
    elif kind in ("int_array", "bool_array"):
        element, name = {
            "int_array": (ctypes.c_int64, "IntArray"),
            "bool_array": (ctypes.c_bool, "BoolArray"),
        }[kind]
        values = list(argument)
        create = getattr(library, f"aclCreate{name}")
        handle = ctypes.c_void_p(create((element * len(values))(*values), ctypes.c_uint64(len(values))))
        made.append((f"aclDestroy{name}", handle))
    else:
        raise TypeError(f"arguments of kind {kind} are not supported here")
    return handle


def _tensor(library: ctypes.CDLL, tensor: torch.Tensor | Nz) -> int:
    view = tensor.view if isinstance(tensor, Nz) else tensor
    storage = tensor.storage if isinstance(tensor, Nz) else tensor
    numbers = [(ctypes.c_int64 * max(len(n), 1))(*n) for n in (view.shape, view.stride(), storage.shape)]
    return library.aclCreateTensor(
        numbers[0],
        ctypes.c_uint64(view.dim()),
        _DTYPES[view.dtype],
        numbers[1],
        ctypes.c_int64(0),
        _FRACTAL_NZ if isinstance(tensor, Nz) else _ND,
        numbers[2],
        ctypes.c_uint64(storage.dim()),
        ctypes.c_void_p(storage.data_ptr()),
    )
