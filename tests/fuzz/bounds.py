"""How far from float64 a result may be: roundings that the op's order demands, and the noise of fp32 sums."""

from __future__ import annotations

import torch
from torch import Tensor

from liteboost_adaptor.ops import ops

FP32 = 2.0**-24
#: Relative error of one rounding to nearest.
UNIT = {torch.float32: FP32, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
#: Twice the error of a rounding among the denormals; of fp32, room for products that fall among them.
TINY = {torch.float32: 1e-36, torch.bfloat16: 1e-36, torch.float16: 2.0**-24}


def noise(terms: int) -> float:
    """Relative error of a few fp32 operations after a sum of so many terms, at least 16 of them at once."""
    return (24 + terms / 8) * FP32


def double(value: object) -> object:
    """Float tensors in float64, anything else as it is."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def exact(name: str, arguments: dict[str, object]) -> list[Tensor]:
    """The op's reference in float64, always as a list."""
    result = ops()[name].reference(**{key: double(value) for key, value in arguments.items()})
    return [result] if isinstance(result, Tensor) else list(result)


def assert_within(result: Tensor, exact: Tensor, bound: Tensor | float) -> None:
    """Raise AssertionError unless each element of ``result`` is within ``bound`` of ``exact``.

    Infinite and NaN must be the same in both, except that beyond the result's dtype the result is infinite.
    """
    assert result.shape == exact.shape, f"shape {tuple(result.shape)} instead of {tuple(exact.shape)}"
    assert result.is_contiguous(), f"not contiguous: strides {result.stride()}"
    found, bound = result.double(), torch.as_tensor(bound, dtype=torch.float64).expand(exact.shape)
    wrong = ~((found - exact).abs() <= bound)
    wrong &= ~((found == exact) | (found.isnan() & exact.isnan()))
    overflow = exact.abs() + bound > torch.finfo(result.dtype).max * (1 - UNIT[result.dtype])
    wrong &= ~(overflow & (found == torch.inf * exact.sign()))
    if wrong.any():
        first = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} elements are beyond their bound; at {first} "
            f"{found[first]} instead of {exact[first]}, bound {bound[first]}"
        )


def assert_same(result: Tensor, expected: Tensor) -> None:
    """Raise AssertionError unless dtype, shape and every value are the same; NaN equals NaN."""
    assert result.dtype == expected.dtype and result.is_contiguous()
    torch.testing.assert_close(result, expected.contiguous(), rtol=0, atol=0, equal_nan=True)
