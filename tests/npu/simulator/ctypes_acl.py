"""aclnn called by hand, without torch_npu between: for tests that do what no honest caller does."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch

DTYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.int8: 2,
    torch.int32: 3,
    torch.int64: 9,
    torch.bfloat16: 27,
}
ND = 2


def library() -> ctypes.CDLL:
    opapi = ctypes.CDLL("libopapi.so")
    opapi.aclCreateTensor.restype = ctypes.c_void_p
    return opapi


def create_tensor(tensor: torch.Tensor, strides: list[int] | None = None) -> int:
    """An aclTensor that describes ``tensor``, with its own strides or other ones."""
    dims = tensor.dim()
    shape = (ctypes.c_int64 * dims)(*tensor.shape)
    steps = (ctypes.c_int64 * dims)(*(strides or tensor.stride()))
    made = library().aclCreateTensor(
        *(shape, ctypes.c_uint64(dims), ctypes.c_int(DTYPES[tensor.dtype]), steps, ctypes.c_int64(0)),
        *(ctypes.c_int(ND), shape, ctypes.c_uint64(dims)),
        ctypes.c_void_p(tensor.data_ptr()),
    )
    assert made
    return made


@dataclass
class Call:
    """One call of an operator; arguments are aclTensors (int), None, or ctypes values."""

    op: str
    arguments: list[object]
    workspace: int = 0
    executor: ctypes.c_void_p = field(default_factory=ctypes.c_void_p)

    def prepare(self) -> int:
        """Phase 1; returns its code."""
        size = ctypes.c_uint64()
        converted = [ctypes.c_void_p(a) if a is None or isinstance(a, int) else a for a in self.arguments]
        function = getattr(library(), f"{self.op}GetWorkspaceSize")
        code = function(*converted, ctypes.byref(size), ctypes.byref(self.executor))
        self.workspace = size.value
        return code

    def launch(self, workspace: torch.Tensor | None = None, size: int | None = None) -> int:
        """Phase 2 with this workspace, on the null stream; returns its code."""
        address = None if workspace is None else workspace.data_ptr()
        bytes_ = (0 if workspace is None else workspace.numel()) if size is None else size
        function = getattr(library(), self.op)
        return function(
            ctypes.c_void_p(address), ctypes.c_uint64(bytes_), self.executor, ctypes.c_void_p(None)
        )


def error_message() -> str:
    """What the last error on this thread was about."""
    runtime = ctypes.CDLL("libascendcl.so")
    runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
    return (runtime.aclGetRecentErrMsg() or b"").decode()
