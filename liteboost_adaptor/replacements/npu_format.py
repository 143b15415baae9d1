"""FRACTAL_NZ, the layout in which an NPU's cube unit reads a matrix: what may lie in it, and casting.

A matrix ``[n, k]`` of 16 bit numbers lies in blocks of 16 x 16, both axes padded. Shape, strides and values
are those of the matrix; only what is in memory differs, so whatever does not know the layout must be given a
copy in ND. Source: "FRACTAL_NZ" and "aclnnMatmulWeightNz" of CANN's documentation.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch

from ..eligibility import observed

ND, FRACTAL_NZ = 2, 29
_OPTION, _ON = "ALLOW_INTERNAL_FORMAT", b"enable"
_DTYPES = (torch.float16, torch.bfloat16)


def format_of(tensor: torch.Tensor) -> int:
    """The format of a tensor on an NPU."""
    return int(sys.modules["torch_npu"].get_npu_format(tensor))


def cast(tensor: torch.Tensor, format: int) -> torch.Tensor:
    """``tensor`` in memory of its own in another format; FRACTAL_NZ must be allowed (`internal`)."""
    flags: Any = torch.utils.deterministic  # a property of a class that torch gives this module
    before = flags.fill_uninitialized_memory
    flags.fill_uninitialized_memory = False  # all of it is written, padding too
    try:
        # torch_npu casts the shape that the memory was made with, not that of a view: a copy has one shape.
        whole = tensor.clone(memory_format=torch.contiguous_format) if format == FRACTAL_NZ else tensor
        return torch.ops.npu.npu_format_cast(whole, format)
    finally:
        flags.fill_uninitialized_memory = before


def padding_of(tensor: torch.Tensor) -> int:
    """Bytes of its storage that hold none of its numbers."""
    return tensor.untyped_storage().nbytes() - tensor.numel() * tensor.element_size()


class InternalFormats:
    """torch_npu's ``allow_internal_format``, without which `cast` gives ND.

    Off by default; torch_npu 2.9.0 has no default, and casts unless it is off.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before_us: bytes | None = None
        self._inside = 0
        self._before_block = b""

    @property
    def are_the_users(self) -> bool:
        """Whether the user had allowed them, so that a tensor in FRACTAL_NZ may be the user's."""
        if self._before_us is not None:
            return self._before_us == _ON
        return (self._before_block if self._inside else _option()) == _ON

    def allow(self) -> None:
        """Allow them for good.

        Taken back, a clone of any tensor in FRACTAL_NZ that is still there (of a state_dict, say) would be
        marked as ND and be garbage (torch_npu 2.13).
        """
        with self._lock:
            if self._before_us is None:
                self._before_us = self._before_block if self._inside else _option()
                _set_option(_ON)

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Allow them inside the block, for tensors that nobody else sees."""
        with self._lock:
            if not self._inside:
                self._before_block = _option()
                _set_option(_ON)
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside and self._before_us is None:
                    _set_option(self._before_block)


internal = InternalFormats()


def _option() -> bytes:
    """What it is set to; empty where nothing is (torch_npu 2.9.0)."""
    torch.npu.init()  # type: ignore[attr-defined] # torch_npu's; sets the default
    return sys.modules["torch_npu"]._C._npu_getOption(_OPTION) or b""


def _set_option(value: bytes) -> None:
    # Not by `torch.npu.config.allow_internal_format`, which cannot set it back to nothing.
    sys.modules["torch_npu"]._C._npu_setOption({_OPTION: value.decode()})


def layer_unfit(layer: torch.nn.Module) -> str:
    """Why the weight of a layer that our op serves stays in ND; empty if the layer itself gives no reason."""
    if type(layer) is not torch.nn.Linear:
        return "no plain nn.Linear"
    weight = layer._parameters.get("weight")
    if type(weight) is not torch.nn.Parameter:
        return "the weight is no plain parameter"
    if weight.dtype not in _DTYPES:
        return f"dtype {str(weight.dtype).removeprefix('torch.')}"
    if weight.device.type != "npu":
        return f"on device {weight.device.type}"
    if weight.requires_grad:
        return "requires grad: model.requires_grad_(False) lets it be cast"
    if reason := observed(layer):
        return reason
    if format_of(weight) == FRACTAL_NZ:
        return ""
    if not weight.is_contiguous() or weight.storage_offset() or padding_of(weight):
        return "a view of other memory"
    return torch.ops.liteboost._npu_nz_refusal(weight.detach(), layer._parameters.get("bias"))
