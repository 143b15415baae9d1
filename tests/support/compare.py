"""What the tests of the ops have in common: the error bound, sizes, dtypes, and views with sentinels."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
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


def assert_same_on_any_threads(run: Callable[[], Any], counts: tuple[int, ...] = (1, 2, 3)) -> None:
    """``run``, which gives a tensor or several, gives the same bits on every number of threads."""
    before, results = torch.get_num_threads(), []
    try:
        for count in counts:
            torch.set_num_threads(count)
            result = run()
            results.append([result] if isinstance(result, Tensor) else result)
    finally:
        torch.set_num_threads(before)
    for count, result in zip(counts, results, strict=True):
        assert all(map(same_bits, result, results[0])), f"{count} threads"


def assert_refused(
    functions: tuple[Callable[..., Any], ...], arguments: tuple, error: type[Exception], text: str
) -> None:
    """All of them raise this error in the same words, which say what was asked, what found, what to do."""
    messages = set()
    for function in functions:
        with pytest.raises(error, match=text) as raised:
            function(*arguments)
        # Python and C++ spell dtypes, and numbers that are whole, in their own ways.
        words = str(raised.value).split("\n")[0].lower()
        messages.add(re.sub(r"long|int\d*|char|\.0\b", "", words))
    (message,) = messages
    asked_and_found, _, to_do = message.partition("; ")
    assert re.search(r"must .*got ", asked_and_found) and len(to_do.split()) >= 2


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
