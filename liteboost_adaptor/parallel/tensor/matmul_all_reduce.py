"""A product and its all-reduce as one operator (``aclnnMatmulAllReduce``), for prompts on an A2.

While one part of the product is sent, the next is computed. CANN documents it for prompts and not for single
tokens, in 16 bits, for 2, 4 or 8 cards of one host, and of a model for one communicator only; not for an A3.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...eligibility import HALVES
from ...report import report
from ..runtime.groups import Group, all_gather_object, host

_SIZES = (2, 4, 8)
_FRACTAL_NZ = 29
#: Of the comparison: rows, columns on a rank, outputs; and how far from float64 a result may be over the
#: largest of its row: four roundings, as `selftest.compare` allows.
_COMPARED = (24, 256, 128)
_ALLOWED = {torch.bfloat16: 4 * 2.0**-8, torch.float16: 4 * 2.0**-11}


def matmul_all_reduce(x: Tensor, weight: Tensor, group: str) -> Tensor | None:
    """All-reduce of ``x @ weight^T``; None where that takes two operators.

    Args:
        x: ``[batch, tokens, some features]``; ranks come with the same shape.
        weight: ``[out, some features]``.
        group: Name of the process group.
    """
    if x.device.type != "npu" or not is_prompt(x) or x.dtype not in HALVES or weight.dtype != x.dtype:
        return None
    if torch.compiler.is_compiling() or torch.npu.is_current_stream_capturing() or _is_nz(weight):
        return None
    name = _communicator(group, x.dtype, x.device.index)
    return torch.ops.npu.npu_mm_all_reduce_base(x.contiguous(), weight.t(), name) if name else None


def is_prompt(x: Tensor) -> bool:
    """Whether there are several tokens of each sequence."""
    return x.dim() == 3 and x.shape[1] > 1 and x.numel() > 0


def _is_nz(weight: Tensor) -> bool:
    import torch_npu

    return torch_npu.get_npu_format(weight) == _FRACTAL_NZ


@functools.cache
def _communicator(name: str, dtype: torch.dtype, device: int) -> str:
    """What the operator calls the group ``name``; empty where it may not be used. All ranks ask together."""
    ranks = dist.distributed_c10d._resolve_process_group(name)
    group = Group(name, dist.get_rank(ranks), dist.get_world_size(ranks))
    if group.size not in _SIZES or set(all_gather_object(group, (host(), _is_a2()))) != {(host(), True)}:
        return ""
    dist.all_reduce(torch.zeros(1, device=f"npu:{device}"), group=ranks)  # from here on there is one
    # A group has a communicator for each device; what is asked for by a rank means the device of that number.
    communicator = ranks._get_backend(torch.device("npu")).get_hccl_comm_name(device, init_comm=False)
    reason = next(filter(None, all_gather_object(group, _why_not(communicator, group, dtype, device))), "")
    if reason:
        report.note(f"Products are not fused with their all-reduce: {reason}.")
    return "" if reason else communicator


def _is_a2() -> bool:
    soc = getattr(torch.ops.liteboost, "_npu_soc", None)  # there is none without our library for NPUs
    return soc is not None and soc().startswith("Ascend910B")


def _why_not(communicator: str, group: Group, dtype: torch.dtype, device: int) -> str:
    """What speaks against the operator here, after a comparison with float64; or an empty string."""
    rows, columns, outputs = _COMPARED
    generator = torch.Generator("cpu").manual_seed(group.rank)
    x = torch.randn(1, rows, columns, generator=generator, device="cpu").to(dtype)
    weight = torch.randn(outputs, columns, generator=generator, device="cpu").to(dtype)
    exact = sum(all_gather_object(group, F.linear(x.double(), weight.double())))
    try:
        there = f"npu:{device}"
        found = torch.ops.npu.npu_mm_all_reduce_base(x.to(there), weight.to(there).t(), communicator)
    except RuntimeError as fault:
        return f"{type(fault).__name__}: {' '.join(str(fault).split())[:200]}"
    scale = exact.abs().amax(-1, keepdim=True)
    error = ((found.cpu().double() - exact).abs() / scale).max().item()
    if not error <= _ALLOWED[dtype]:
        allowed = _ALLOWED[dtype]
        return f"aclnnMatmulAllReduce differs from its reference: error {error:.2e}, allowed {allowed:.2e}"
    return ""
