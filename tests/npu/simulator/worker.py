"""The process that `calls.Simulator` talks to: calls aclnn functions through ctypes, without torch_npu.

It reads pickled requests from stdin and writes pickled answers to stdout. Tensors are copied to device memory
of the simulator with their strides, offset and format, and read back after the call.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import sys
from typing import Any, BinaryIO

import torch

HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
FORMAT_ND = 2
HCCL_ROOT_INFO_BYTES = 4108
DTYPES = {
    torch.float32: 0, torch.float16: 1, torch.int8: 2, torch.int32: 3, torch.uint8: 4, torch.int16: 6,
    torch.int64: 9, torch.uint64: 10, torch.float64: 11, torch.bool: 12, torch.complex64: 16,
    torch.bfloat16: 27,
}  # fmt: skip
NUMBERS = {
    "double": ctypes.c_double, "float": ctypes.c_float, "int64": ctypes.c_int64, "int32": ctypes.c_int32,
    "int8": ctypes.c_int8, "uint64": ctypes.c_uint64, "bool": ctypes.c_bool, "dtype": ctypes.c_int,
}  # fmt: skip

acl = ctypes.CDLL("libascendcl.so", mode=ctypes.RTLD_GLOBAL)
opapi = ctypes.CDLL("libopapi.so", mode=ctypes.RTLD_GLOBAL)
for function in (acl.aclGetRecentErrMsg, opapi.simcann_signature):
    function.restype = ctypes.c_char_p
for kind in ("Tensor", "Scalar", "IntArray", "TensorList"):
    getattr(opapi, f"aclCreate{kind}").restype = ctypes.c_void_p


class Device:
    """The device memory and acl objects of one call."""

    def __init__(self) -> None:
        self.memory: list[tuple[ctypes.c_void_p, torch.Tensor, int]] = []
        self.objects: list[tuple[str, ctypes.c_void_p]] = []
        self.by_storage: dict[int, ctypes.c_void_p] = {}
        self.workspaces: list[ctypes.c_void_p] = []

    def workspace(self, size: ctypes.c_uint64) -> ctypes.c_void_p | None:
        """Device memory of as many bytes as phase 1 asked for."""
        if not size.value:
            return None
        pointer = ctypes.c_void_p()
        check(acl.aclrtMalloc(ctypes.byref(pointer), ctypes.c_size_t(size.value), 0))
        self.workspaces.append(pointer)
        return pointer

    def storage(self, tensor: torch.Tensor) -> ctypes.c_void_p:
        """Device memory of the tensor's whole storage; views of one storage share it."""
        flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        if flat.data_ptr() in self.by_storage:
            return self.by_storage[flat.data_ptr()]
        pointer = ctypes.c_void_p()
        size = max(flat.numel(), 1)
        check(acl.aclrtMalloc(ctypes.byref(pointer), ctypes.c_size_t(size), 0))
        if flat.numel():
            host = ctypes.c_void_p(flat.data_ptr())
            check(
                acl.aclrtMemcpy(pointer, ctypes.c_size_t(size), host, ctypes.c_size_t(size), HOST_TO_DEVICE)
            )
        self.memory.append((pointer, flat, size))
        self.by_storage[flat.data_ptr()] = pointer
        return pointer

    def tensor(self, argument: Any) -> ctypes.c_void_p | None:
        if argument is None:
            return None
        tensor, form, storage_shape = argument
        shape = (ctypes.c_int64 * tensor.dim())(*tensor.shape)
        strides = (ctypes.c_int64 * tensor.dim())(*tensor.stride())
        stored = storage_shape or [tensor.untyped_storage().nbytes() // tensor.element_size()]
        stored_shape = (ctypes.c_int64 * len(stored))(*stored)
        made = ctypes.c_void_p(
            opapi.aclCreateTensor(
                shape, ctypes.c_uint64(tensor.dim()), DTYPES[tensor.dtype], strides,
                ctypes.c_int64(tensor.storage_offset()), form, stored_shape, ctypes.c_uint64(len(stored)),
                self.storage(tensor) if tensor.numel() else None,
            )
        )  # fmt: skip
        self.objects.append(("Tensor", made))
        return made

    def argument(self, kind: str, value: Any) -> Any:
        if kind == "tensor":
            return self.tensor(value)
        if kind == "string":
            return None if value is None else ctypes.c_char_p(value.encode())
        if kind in NUMBERS:
            return NUMBERS[kind](DTYPES[value] if kind == "dtype" else value)
        if value is None:
            return None
        if kind == "tensor_list":
            elements = [self.tensor(v) for v in value]
            del self.objects[len(self.objects) - len(elements) :]  # the list owns them
            made = opapi.aclCreateTensorList(
                (ctypes.c_void_p * len(elements))(*elements), ctypes.c_uint64(len(elements))
            )
            return self.keep("TensorList", made)
        if kind == "int_array":
            made = opapi.aclCreateIntArray((ctypes.c_int64 * len(value))(*value), ctypes.c_uint64(len(value)))
            return self.keep("IntArray", made)
        if kind == "scalar":
            return self.keep("Scalar", opapi.aclCreateScalar(ctypes.byref(ctypes.c_double(value)), 11))
        raise ValueError(f"an argument of kind {kind} is not served")

    def keep(self, kind: str, pointer: int) -> ctypes.c_void_p:
        self.objects.append((kind, ctypes.c_void_p(pointer)))
        return self.objects[-1][1]

    def read_back(self) -> None:
        """Into the host storages, so every tensor of the request is as it is on the device."""
        for pointer, flat, size in self.memory:
            if flat.numel():
                host = ctypes.c_void_p(flat.data_ptr())
                check(
                    acl.aclrtMemcpy(
                        host, ctypes.c_size_t(size), pointer, ctypes.c_size_t(size), DEVICE_TO_HOST
                    )
                )

    def free(self) -> None:
        for kind, pointer in self.objects:
            getattr(opapi, f"aclDestroy{kind}")(pointer)
        for pointer in [*self.workspaces, *(pointer for pointer, _, _ in self.memory)]:
            acl.aclrtFree(pointer)


def check(code: int) -> None:
    if code:
        raise RuntimeError(f"the runtime answered {code}: {acl.aclGetRecentErrMsg()}")


def call(op: str, arguments: list[Any]) -> dict[str, Any]:
    """Both phases of one operator; ``code`` is that of the phase that failed, or 0."""
    signature = opapi.simcann_signature(op.encode())
    if signature is None:
        raise ValueError(f"the simulator has no {op}")
    kinds = signature.decode().split(",")
    if len(kinds) != len(arguments):
        raise ValueError(
            f"{op} takes {len(kinds)} arguments ({signature.decode()}), {len(arguments)} were given"
        )
    device = Device()
    try:
        converted = [device.argument(kind, value) for kind, value in zip(kinds, arguments, strict=True)]
        size, executor = ctypes.c_uint64(), ctypes.c_void_p()
        phase1 = getattr(opapi, f"{op}GetWorkspaceSize")
        code, phase = phase1(*converted, ctypes.byref(size), ctypes.byref(executor)), 1
        if code == 0:
            code, phase = getattr(opapi, op)(device.workspace(size), size, executor, None), 2
        message = acl.aclGetRecentErrMsg() if code else b""
        check(acl.aclrtSynchronizeDevice())
        device.read_back()
        answer = {"code": code, "phase": phase, "message": (message or b"").decode()}
        tensors = [
            value[0] if kind == "tensor" and value else
            [element[0] for element in value] if kind == "tensor_list" and value else None
            for kind, value in zip(kinds, arguments, strict=True)
        ]  # fmt: skip
        return answer | {"tensors": tensors}
    finally:
        device.free()


def storage_of(tensor: torch.Tensor, form: int, additional_dtype: int) -> dict[str, Any]:
    """aclnnNpuFormatCastCalculateSizeAndFormat: the storage shape and format it answers with."""
    device = Device()
    try:
        shape, axes, actual = ctypes.POINTER(ctypes.c_int64)(), ctypes.c_uint64(), ctypes.c_int()
        handle = device.tensor((tensor, FORMAT_ND, None))
        function = opapi.aclnnNpuFormatCastCalculateSizeAndFormat
        code = function(
            handle, form, additional_dtype, ctypes.byref(shape), ctypes.byref(axes), ctypes.byref(actual)
        )
        if code:
            return {"code": code, "message": acl.aclGetRecentErrMsg().decode()}
        return {"code": 0, "shape": [shape[k] for k in range(axes.value)], "format": actual.value}
    finally:
        device.free()


def group_root() -> bytes:
    """What rank 0 gives the others (HcclGetRootInfo)."""
    root = ctypes.create_string_buffer(HCCL_ROOT_INFO_BYTES)
    check(hccl().HcclGetRootInfo(root))
    return root.raw


def open_group(ranks: int, rank: int, root: bytes) -> str:
    """Makes this process a rank of a communicator; its name, as HcclGetCommName gives it."""
    communicator, name = ctypes.c_void_p(), ctypes.create_string_buffer(256)
    check(hccl().HcclCommInitRootInfo(ranks, root, rank, ctypes.byref(communicator)))
    check(hccl().HcclGetCommName(communicator, name))
    return name.value.decode()


def hccl() -> ctypes.CDLL:
    return ctypes.CDLL("libhccl.so")


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    check(acl.aclInit(None))
    check(acl.aclrtSetDevice(0))
    functions = {function.__name__: function for function in (call, storage_of, group_root, open_group)}
    while True:
        try:
            function, arguments = pickle.load(requests)
        except EOFError:
            return
        try:
            answer: Any = functions[function](*arguments)
        except Exception as error:  # noqa: BLE001 raised again by the asking process
            answer = error
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    stdout = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not reach the answers
    serve(sys.stdin.buffer, stdout)
