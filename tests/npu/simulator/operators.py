"""What the tests of the simulator's operators share."""

from __future__ import annotations

import pytest
import torch
from cann_sim.call import Refused, call

#: Relative rounding of a store in this dtype, twice the unit roundoff.
ROUNDING = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(shape: tuple[int, ...], dtype: torch.dtype, seed: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=generator(seed)) * scale).to(dtype)


def integers(low: int, high: int, shape: tuple[int, ...], seed: int, dtype=torch.int8) -> torch.Tensor:
    """Values in [low, high]."""
    return torch.randint(low, high + 1, shape, generator=generator(seed)).to(dtype)


def close(out: torch.Tensor, reference: torch.Tensor, roundings: float = 1.0, inside: float = 0.0) -> None:
    """``out`` is the float64 ``reference`` after ``roundings`` stores in its dtype.

    ``inside``: error of roundings inside the operator, relative to the largest value of the reference.
    """
    assert reference.dtype == torch.float64
    assert out.shape == reference.shape
    allowed = ROUNDING[out.dtype] * roundings * reference.abs() + (1e-6 + inside) * reference.abs().max()
    worst = ((out.double() - reference).abs() - allowed).max()
    assert worst <= 0, f"{worst} beyond what is allowed, of values up to {reference.abs().max()}"


def rounded(out: torch.Tensor, real: torch.Tensor, slack: float = 1e-3, bits: int = 8) -> None:
    """Integers ``out`` are the float64 values ``real``, rounded and saturated.

    ``slack``: how far float32 arithmetic may have moved a value before it was rounded.
    """
    high = 2 ** (bits - 1) - 1
    assert out.shape == real.shape
    assert (out.double() - real.clamp(-high - 1, high)).abs().max() <= 0.5 + slack
    assert out.unique().numel() > 4  # not a constant


def pack(values: torch.Tensor) -> torch.Tensor:
    """8 int4 in each int32, the first in the lowest bits."""
    nibbles = (values.to(torch.int64) & 0xF).unflatten(-1, (-1, 8))
    packed = (nibbles << (4 * torch.arange(8))).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    nibbles = (packed.to(torch.int64).unsqueeze(-1) >> (4 * torch.arange(8))) & 0xF
    return torch.where(nibbles >= 8, nibbles - 16, nibbles).flatten(-2).to(torch.int8)


def refused(message: str, name: str, *arguments: object, code: int = 161002) -> None:
    """The operator refuses in phase 1, with this text in its message."""
    with pytest.raises(Refused, match=message) as error:
        call(name, *arguments)
    assert error.value.code == code
