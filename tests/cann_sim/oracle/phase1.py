"""Phase 1 of aclnn functions on the simulator: ``python -m cann_sim.oracle.phase1``.

Calls are read pickled from stdin, answers are written to stdout. Tensors have no memory of the device,
only what phase 1
looks at.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from typing import Any

from .values import Scalar, Tensor, Vector

_DTYPES = {
    "FLOAT": 0, "FLOAT16": 1, "INT8": 2, "INT32": 3, "UINT8": 4, "INT16": 6, "UINT16": 7, "UINT32": 8,
    "INT64": 9,
    "UINT64": 10, "DOUBLE": 11, "BOOL": 12, "COMPLEX64": 16, "COMPLEX128": 17, "BF16": 27, "INT4": 29,
    "COMPLEX32": 33,
    "HIFLOAT8": 34, "FLOAT8_E5M2": 35, "FLOAT8_E4M3FN": 36, "FLOAT8_E8M0": 37, "FLOAT4_E2M1": 40,
    "FLOAT4_E1M2": 41,
}  # fmt: skip
_FORMATS = {
    "NCHW": 0,
    "NHWC": 1,
    "ND": 2,
    "NC1HWC0": 3,
    "FRACTAL_Z": 4,
    "FRACTAL_NZ": 29,
    "NCDHW": 30,
    "NCL": 47,
}
_NUMBERS = {
    "double": ctypes.c_double, "float": ctypes.c_float, "int64": ctypes.c_int64, "int32": ctypes.c_int32,
    "int8": ctypes.c_int8, "uint64": ctypes.c_uint64, "bool": ctypes.c_bool,
}  # fmt: skip
_ARRAYS = {
    "int_array": ("Int", ctypes.c_int64),
    "bool_array": ("Bool", ctypes.c_bool),
    "float_array": ("Float", ctypes.c_float),
}


#: Of an operator that communicates, the argument that names its group.
_GROUPS = {"aclnnMatmulAllReduce": 3}
_ROOT_BYTES = 4108  # HcclRootInfo


class Untranslatable(Exception):
    """A set that is no call of the simulator, for a reason of ours."""


def verdict(message: str) -> tuple[str, str]:
    """What a refusal with this message says: of what is not simulated there are no limits."""
    return ("untranslatable" if "not simulated" in message else "refused"), message


class Caller:
    def __init__(self) -> None:
        self.acl = ctypes.CDLL("libascendcl.so", mode=ctypes.RTLD_GLOBAL)
        self.opapi = ctypes.CDLL("libopapi.so", mode=ctypes.RTLD_GLOBAL)
        for function in (self.acl.aclGetRecentErrMsg, self.opapi.simcann_signature):
            function.restype = ctypes.c_char_p
        for kind in ("Tensor", "Scalar", "IntArray", "BoolArray", "FloatArray", "TensorList"):
            getattr(self.opapi, f"aclCreate{kind}").restype = ctypes.c_void_p
        self.acl.aclInit(None)
        self.acl.aclrtSetDevice(0)
        self._group = ""

    def answer(self, operator: str, arguments: list[Any]) -> tuple[str, str]:
        """``accepted``, ``refused`` or ``untranslatable``, and why."""
        signature = self.opapi.simcann_signature(operator.encode())
        function = getattr(self.opapi, f"{operator}GetWorkspaceSize", None) if signature else None
        if function is None:
            return "untranslatable", "the simulator has no such operator in this release"
        kinds = signature.decode().split(",")
        if len(kinds) != len(arguments):
            return "untranslatable", f"it takes {len(kinds)} arguments, the test gives {len(arguments)}"
        objects: list[tuple[str, Any]] = []
        if (at := _GROUPS.get(operator)) is not None and arguments[at]:
            arguments = [*arguments[:at], self._one_rank(), *arguments[at + 1 :]]
        try:
            given = [
                self._argument(kind, value, objects) for kind, value in zip(kinds, arguments, strict=True)
            ]
            size, executor = ctypes.c_uint64(), ctypes.c_void_p()
            code = function(*given, ctypes.byref(size), ctypes.byref(executor))
            message = (self.acl.aclGetRecentErrMsg() or b"").decode(errors="replace") if code else ""
            return verdict(message) if code else ("accepted", "")
        except Untranslatable as reason:
            return "untranslatable", str(reason)
        finally:
            for kind, made in objects:
                getattr(self.opapi, f"aclDestroy{kind}")(ctypes.c_void_p(made))

    def _argument(self, kind: str, value: Any, objects: list[tuple[str, Any]]) -> Any:
        if kind in _NUMBERS:
            if not isinstance(value, int | float):
                raise Untranslatable(f"{value!r:.40} for a number")
            return _NUMBERS[kind](value if kind in ("double", "float") else int(value))
        if value is None:
            return None
        if kind == "string" and isinstance(value, str):
            return ctypes.c_char_p(value.encode())
        if kind == "tensor" and isinstance(value, Tensor):
            return self._kept("Tensor", self._tensor(value), objects)
        if kind == "tensor_list" and isinstance(value, Tensor | Vector):
            elements = [self._tensor(one) for one in ([value] if isinstance(value, Tensor) else value)]
            made = self.opapi.aclCreateTensorList(
                (ctypes.c_void_p * len(elements))(*elements), ctypes.c_uint64(len(elements))
            )
            return self._kept("TensorList", made, objects)
        if kind in _ARRAYS and isinstance(value, Vector):
            name, of = _ARRAYS[kind]
            made = getattr(self.opapi, f"aclCreate{name}Array")(
                (of * len(value))(*value), ctypes.c_uint64(len(value))
            )
            return self._kept(f"{name}Array", made, objects)
        if kind == "scalar" and isinstance(value, Scalar):
            number = ctypes.c_double(float(value.value))
            return self._kept("Scalar", self.opapi.aclCreateScalar(ctypes.byref(number), 11), objects)
        raise Untranslatable(f"{value!r:.40} for a {kind}")

    def _one_rank(self) -> str:
        """The name of a group of one rank, for the tests' own groups are of their bench."""
        if not self._group:
            hccl = ctypes.CDLL("libhccl.so")
            root, name = (ctypes.create_string_buffer(size) for size in (_ROOT_BYTES, 256))
            communicator = ctypes.c_void_p()
            hccl.HcclGetRootInfo(root)
            hccl.HcclCommInitRootInfo(1, root, 0, ctypes.byref(communicator))
            hccl.HcclGetCommName(communicator, name)
            self._group = name.value.decode()
        return self._group

    def _kept(self, kind: str, made: Any, objects: list[tuple[str, Any]]) -> ctypes.c_void_p:
        objects.append((kind, made))
        return ctypes.c_void_p(made)

    def _tensor(self, of: Tensor) -> Any:
        of = _packed(of)
        dtype, form = (
            of.dtype.removeprefix("ACL_").removeprefix("DT_"),
            of.format.removeprefix("ACL_").removeprefix("FORMAT_"),
        )
        if dtype not in _DTYPES or form not in _FORMATS:
            raise Untranslatable(f"a tensor of {dtype} in {form}")
        dims = len(of.shape)
        strides = (ctypes.c_int64 * dims)(*of.strides) if of.strides and len(of.strides) == dims else None
        storage = of.storage if of.storage is not None else of.shape
        made = self.opapi.aclCreateTensor(
            (ctypes.c_int64 * dims)(*of.shape), ctypes.c_uint64(dims), _DTYPES[dtype], strides,
            ctypes.c_int64(0),
            _FORMATS[form], (ctypes.c_int64 * len(storage))(*storage), ctypes.c_uint64(len(storage)), None,
        )  # fmt: skip
        if not made:
            raise Untranslatable(f"a tensor of {dtype}: the simulator has none")
        return made


def _packed(of: Tensor) -> Tensor:
    """int4 as the simulator has it: eight in an int32, along the axis that lies contiguous."""
    if not of.dtype.endswith("_INT4"):
        return of
    if of.format.endswith("FRACTAL_NZ") and of.storage:
        raise Untranslatable("int4 in FRACTAL_NZ, whose memory has other axes as int32")
    transposed = of.strides is not None and len(of.strides) == len(of.shape) >= 2 and of.strides[-1] != 1
    axis = -2 if transposed else -1
    if not of.shape or of.shape[axis] % 8:
        raise Untranslatable("int4 in rows that are no multiple of 8")
    shape = list(of.shape)
    shape[axis] //= 8
    strides = None
    if of.strides and transposed:
        strides = [step if k == len(shape) - 2 else step // 8 for k, step in enumerate(of.strides)]
    return Tensor(shape, "ACL_INT32", of.format, strides, 0, None, of.data)


if __name__ == "__main__":
    caller = Caller()
    pickle.dump([caller.answer(*call) for call in pickle.load(sys.stdin.buffer)], sys.stdout.buffer)
