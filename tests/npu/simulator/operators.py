"""What the tests of quantized, routing and collective operators share."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from .calls import NZ, Simulator, Stored, started

RELEASE = "9.1.0"  # the first that has all of these operators
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


def hardware_scale(
    scale: torch.Tensor, offset: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The 64-bit form of a scale, as aclnnTransQuantParamV2 makes it, and its 19-bit value in float64."""
    bits = scale.view(torch.int32).to(torch.int64) & 0xFFFFE000 | 1 << 46
    if offset is not None:
        bits |= (offset.to(torch.int64) & 0x1FF) << 37
    return bits, (scale.view(torch.int32) & ~0x1FFF).view(torch.float32).double()


class Nz:
    """A matrix stored in FRACTAL_NZ; ``.t()`` is the same storage seen transposed.

    ``(..., r, c)`` lies as ``(..., c / width, r / 16, 16, width)``, a row of a block being 32 bytes.
    """

    def __init__(self, values: torch.Tensor, transposed: bool = False, storage: torch.Tensor | None = None):
        self.values, self.transposed = values, transposed
        self.storage = _blocks(values) if storage is None else storage

    def t(self) -> Nz:
        return Nz(self.values, not self.transposed, self.storage)

    def stored(self) -> Stored:
        view = self.values.transpose(-1, -2) if self.transposed else self.values
        return Stored(self.storage.view(-1).as_strided(view.shape, view.stride()), NZ, self.storage.shape)


def _blocks(values: torch.Tensor) -> torch.Tensor:
    width = 32 // values.element_size()
    rows, columns = values.shape[-2:]
    padded = torch.nn.functional.pad(values.contiguous(), (0, -columns % width, 0, -rows % 16))
    return padded.unflatten(-1, (-1, width)).unflatten(-3, (-1, 16)).movedim(-2, -4).contiguous()


_chosen: ContextVar[Simulator | None] = ContextVar("chosen", default=None)


@contextmanager
def on(simulator: Simulator) -> Iterator[None]:
    """Calls inside go to this simulator."""
    before = _chosen.set(simulator)
    try:
        yield
    finally:
        _chosen.reset(before)


def on_soc(soc: str):
    return on(started(soc, RELEASE))


def in_release(release: str):
    return on(started("910B", release))


def _answer(name: str, arguments: tuple) -> dict:
    simulator = _chosen.get() or started("910B", RELEASE)
    return simulator.call(name, *(a.stored() if isinstance(a, Nz) else a for a in arguments))


def call(name: str, *arguments: object) -> None:
    """Calls the operator; the tensors among the arguments are afterwards as it left them."""
    answer = _answer(name, arguments)
    assert answer["code"] == 0, f"{name}: {answer['code']} in phase {answer['phase']}: {answer['message']}"
    for given, after in zip(arguments, answer["tensors"], strict=True):
        _take(given, after)


def _take(given: object, after: object) -> None:
    if after is None:  # no tensor
        return
    if isinstance(given, list):
        for one, left in zip(given, after, strict=True):
            _take(one, left)
    elif isinstance(given, Nz):
        given.storage.copy_(after.as_strided(given.storage.shape, given.storage.stride()))
    elif isinstance(given, torch.Tensor) and not torch.equal(given, after):
        given.copy_(after)


def refused(message: str, name: str, *arguments: object, code: int = 161002) -> None:
    """Phase 1 answers with ``code``, and its message has this pattern in it."""
    answer = _answer(name, arguments)
    assert (answer["code"], answer["phase"]) == (code, 1), f"{name} was accepted, or: {answer['message']}"
    assert re.search(message, answer["message"]), answer["message"]
