"""A norm over all heads, of which a rank holds some."""

from __future__ import annotations

import torch
from torch import Tensor, nn

collectives = torch.ops.liteboost_parallel


class ParallelRMSNorm(nn.Module):
    """RMSNorm over all heads, of which a rank holds some; the sums of squares are all-reduced.

    Attributes:
        width: Number of elements on all ranks together.
        rounding: When the result is rounded: ``"before"`` it is multiplied by the weight, or ``"after"``.
    """

    weight: Tensor
    eps: float
    width: int
    rounding: str
    group: str

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        squares = collectives.all_reduce(wide.pow(2).sum(-1, keepdim=True), self.group)
        return _scaled(wide, squares / self.width, self.weight, self.eps, x.dtype, self.rounding)


def _scaled(
    wide: Tensor, mean: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, rounding: str
) -> Tensor:
    normed = wide * torch.rsqrt(mean + eps)
    return weight * normed.to(dtype) if rounding == "before" else (weight * normed).to(dtype)


def norm_rounding(norm: nn.Module) -> str:
    """How ``norm`` rounds, determined by calling it; empty where it computes something else."""
    weight = norm.weight
    generator = torch.Generator().manual_seed(0)
    eps = norm_eps(norm)
    for rounding in ("before", "after"):
        agrees = True
        for dtype in (torch.float32, torch.bfloat16):
            x = (torch.randn(5, weight.numel(), generator=generator) * 3).to(dtype)
            probe = torch.randn(weight.numel(), generator=generator).to(dtype)
            with torch.no_grad():
                found = torch.func.functional_call(norm, {"weight": probe}, (x,))
            wide = x.to(torch.float32)
            agrees &= torch.equal(
                found, _scaled(wide, wide.pow(2).mean(-1, keepdim=True), probe, eps, dtype, rounding)
            )
        if agrees:
            return rounding
    return ""


def norm_eps(norm: nn.Module) -> float:
    """The epsilon of a norm, whatever its name."""
    return next(
        float(getattr(norm, name)) for name in ("variance_epsilon", "eps", "epsilon") if hasattr(norm, name)
    )
