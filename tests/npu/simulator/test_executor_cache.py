"""The executor cache that torch_npu uses where the library has one, and what a wrong key does."""

from __future__ import annotations

import ctypes
import os

import torch
from npu.simulator.ctypes_acl import Call, create_tensor, library
from npu.simulator.programs import output

CACHED = os.environ | {"SIMCANN_EXEC_CACHE": "1"}

REPEATED = """
import torch, torch_npu
from cann_sim.operators import cache_hits
x = torch.arange(6.0).npu()
for step in range(4):
    y = torch.full((6,), float(step)).npu()
    assert torch.equal((x * y).cpu(), x.cpu() * step), step
    assert torch.equal((x[:3] * y[3:]).cpu(), x[:3].cpu() * step), step
print(cache_hits())
"""


def test_torch_npu_takes_executors_from_the_cache_and_binds_them_to_new_tensors() -> None:
    (hits,) = output(REPEATED, CACHED)
    assert int(hits) >= 6


def test_without_the_variable_nothing_is_cached() -> None:
    can_use = library().CanUsePTACache
    can_use.restype = ctypes.c_bool
    assert not can_use(b"aclnnMul")


STALE = """
import torch, torch_npu
from npu.simulator.test_executor_cache import negated
print(negated(torch.arange(8.0).npu(), b"key"))
ones = torch.ones(16).npu()[:4]
print(negated(ones, b"key"))
print(negated(ones, b"another key"))
"""


def negated(x: torch.Tensor, key: bytes) -> list[float]:
    """-x in eight places, with the executor of ``key``, which should say the shape; a caller may forget."""
    opapi = library()
    opapi.PTAFindExecCache.restype = ctypes.c_void_p
    room = torch.zeros(8).npu()
    out = room[: x.numel()]
    opapi.InitPTACacheThreadLocal()
    opapi.SetPTACacheHashKey(key, ctypes.c_size_t(len(key)))
    for tensor in (x, out):
        opapi.AddTensorAddrToCachedList(ctypes.c_void_p(tensor.untyped_storage().data_ptr()))
    size = ctypes.c_uint64()
    executor = opapi.PTAFindExecCache(key, ctypes.c_size_t(len(key)), ctypes.byref(size))
    call = Call("aclnnNeg", [create_tensor(x), create_tensor(out)])
    if executor:
        call.executor = ctypes.c_void_p(executor)
    else:
        assert call.prepare() == 0
    assert call.launch() == 0
    opapi.UnInitPTACacheThreadLocal()
    return room.tolist()


def test_a_stale_executor_works_on_the_old_shape() -> None:
    first, stale, right = output(STALE, CACHED)
    assert first == str([-float(k) for k in range(8)])
    assert stale == str([-1.0] * 8)  # of four numbers that were given
    assert right == str([-1.0] * 4 + [0.0] * 4)
