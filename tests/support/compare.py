"""What the tests of the ops have in common: the error bound, sizes, dtypes, and views with sentinels."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [0, 1, 7, 63, 64, 65, 1000, 4096 + 13]

# fp32 noise of a few operations and of a sum: below one rounding of a 16-bit format by far.
NOISE = 12 * 2.0**-24
# Beyond 1.5 times the original's error: a lucky original may be exact, then this fraction of the norm stands.
FLOOR = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-12, torch.float16: 2.0**-15}


def assert_close(
    result: Tensor, exact: Tensor, original: Tensor, roundings: int = 1, noise: float = NOISE
) -> None:
    """Bound ``result`` by float64 ``exact``: each element, and the whole against the ``original``'s error.

    ``roundings`` is the number of roundings to the result's dtype that the op's order demands, ``noise`` the
    relative error allowed to its fp32 arithmetic.
    """
    assert exact.dtype == torch.float64
    assert result.shape == exact.shape
    assert result.is_contiguous()
    error = (result.double() - exact).abs()
    info = torch.finfo(result.dtype)
    # Results near the smallest normal fp32 number may be flushed: an exponential overflowed on the way.
    floor = max(info.smallest_normal * info.eps, 1e-36)
    bound = (roundings * info.eps / 2 * 1.01 + noise) * exact.abs() + floor
    assert bool((error <= bound).all()), f"largest error {(error / bound).max():.2f} times its bound"
    if result.numel() >= 60:  # So few may all be lucky in the original.
        original_error = (original.double() - exact).norm()
        assert error.norm() <= 1.5 * original_error + FLOOR[result.dtype] * exact.norm()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous(), b.contiguous())


def sentinel_view(tensor: Tensor) -> Tensor:
    """``tensor`` in the middle of a larger allocation full of NaN, off any alignment, rows apart."""
    if tensor.dim() == 1:
        padded = torch.full((tensor.shape[0] + 8,), float("nan"), dtype=tensor.dtype)
        view = padded[3 : 3 + tensor.shape[0]]
    else:
        *leading, rows, size = tensor.shape
        padded = torch.full((*leading, rows, size + 8), float("nan"), dtype=tensor.dtype)
        view = padded[..., 3 : 3 + size]
    return view.copy_(tensor)
