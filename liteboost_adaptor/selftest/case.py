"""What one comparison runs: arguments of an op, made on the CPU; and the table of what makes them."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

#: Head sizes that are listed for ops whose kinds tell them, the most usual one first.
HEADS = (128, 64, 80, 96, 256)
#: Keys from which on a kind is called long: kernels divide them among cores, and causal masks are in blocks.
LONG_FROM = 2049
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One call of an op.

    Attributes:
        label: What distinguishes it from the op's other cases: sizes, strides.
        arguments: By the names of the schema; tensors on the CPU.
        in_nz: Names of those that lie in FRACTAL_NZ when the op runs on an NPU.
        rounds_to: What the op rounds to on the way, where its results have more digits.
    """

    label: str
    arguments: dict[str, Any]
    in_nz: tuple[str, ...] = ()
    rounds_to: torch.dtype | None = None


@dataclass
class Kind:
    """A dtype and a layout class, and the random tensors of its cases.

    Attributes:
        text: As the C++ side spells it: ``"bf16"``, ``"bf16 offset"``, ``"bf16 decode head-128 long"``.
        dtype: Of the tensors.
        layout: What follows the dtype: ``""``, ``"offset"``, ``"decode"``.
        seed: Another one gives other values.
        head: The head size (of values) that it is about; 0: of any.
        is_long: Whether it is about `LONG_FROM` keys and more.
    """

    text: str
    dtype: torch.dtype
    layout: str
    seed: int = 0
    head: int = 0
    is_long: bool = False
    _generator: torch.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator("cpu").manual_seed(zlib.crc32(self.text.encode()) + self.seed)

    @property
    def words(self) -> list[str]:
        """The layout, split at blanks."""
        return self.layout.split()

    def normal(self, *size: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        """Normally distributed numbers, contiguous."""
        values = torch.empty(size, dtype=torch.float32, device="cpu").normal_(generator=self._generator)
        return (values * scale + mean).to(self.dtype)

    def strided(self, *size: int, scale: float = 1.0) -> Tensor:
        """The same as a slice of wider rows, whose first element is not the memory's first."""
        return self.normal(*size[:-1], size[-1] + 16, scale=scale)[..., 16:]

    def swapped(self, *size: int, scale: float = 1.0) -> Tensor:
        """The same with dimensions 1 and 2 exchanged in memory, as heads and positions are in a model."""
        order = (size[0], size[2], size[1], *size[3:])
        return self.normal(*order, scale=scale).transpose(1, 2)

    def integers(self, below: int, *size: int) -> Tensor:
        """Uniformly distributed integers from 0, int64."""
        return torch.empty(size, dtype=torch.int64, device="cpu").random_(below, generator=self._generator)

    def different(self, below: int, *size: int) -> Tensor:
        """The same, no two of them equal."""
        order = torch.randperm(below, generator=self._generator, dtype=torch.int64, device="cpu")
        return order[: math.prod(size)].reshape(size)


_SIZED = re.compile(r"(?P<layout>.*) head-(?P<head>[1-9]\d*)(?P<long> long)?")

Maker = Callable[[Kind], Iterator[Case]]


@dataclass(frozen=True)
class _Cases:
    """The layout classes of an op, and what makes the cases of one; `varied` as of `makes_cases`."""

    layouts: tuple[str, ...]
    maker: Maker
    varied: tuple[str, ...]

    def listed(self) -> Iterator[str]:
        """Layout, head size and length class of every kind that `kinds_of` lists."""
        if not self.varied:
            yield from self.layouts
            return
        yield from (f"{layout} head-{HEADS[0]}" for layout in self.layouts)
        for layout in self.varied:
            yield from (f"{layout} head-{head}" for head in HEADS[1:])
            yield f"{layout} head-{HEADS[0]} long"


_MAKERS: dict[str, _Cases] = {}


def makes_cases(op: str, *layouts: str, varied: tuple[str, ...] = ()) -> Callable[[Maker], Maker]:
    """Decorate the generator of an op's cases.

    Args:
        op: Name without namespace.
        layouts: The layout classes it makes cases for, as the kernel names them behind the dtype; ``""``,
            which is also the default, for an op that has but one.
        varied: For an op whose kinds end with a head size and a length class (``head-64``, ``head-64 long``):
            the layouts that are listed with every size of `HEADS`, and long. Each has cases of any size.
    """

    def register(maker: Maker) -> Maker:
        _MAKERS[op] = _Cases(layouts or ("",), maker, varied)
        return maker

    return register


def ops_with_cases() -> tuple[str, ...]:
    """Every op that can be compared."""
    return tuple(_MAKERS)


def kinds_of(op: str) -> list[str]:
    """The kinds to compare where no model asks: each dtype with each layout class that is listed."""
    return [f"{dtype} {layout}".strip() for layout in _MAKERS[op].listed() for dtype in _dtypes_in(layout)]


def _dtypes_in(layout: str) -> list[str]:
    # No operator that we use takes fp32 in FRACTAL_NZ.
    return [dtype for dtype in DTYPES if not ("nz" in layout.split() and dtype == "fp32")]


def cases_of(op: str, kind: str, seed: int = 0) -> list[Case]:
    """The cases of an op and kind; none where nobody has written any.

    Args:
        op: Name without namespace.
        kind: A dtype of `DTYPES`, and behind it the layout class if the op has several; then, of an op whose
            kinds tell them, ``head-`` with a size, and ``long``.
        seed: Another one gives other values in the same shapes.
    """
    found = _MAKERS.get(op)
    dtype, _, layout = kind.partition(" ")
    head, is_long = 0, False
    if found is not None and found.varied and (sized := _SIZED.fullmatch(layout)):
        layout, head, is_long = sized["layout"], int(sized["head"]), bool(sized["long"])
    if found is None or layout not in found.layouts or dtype not in _dtypes_in(layout):
        return []
    return list(found.maker(Kind(kind, DTYPES[dtype], layout, seed, head, is_long)))
