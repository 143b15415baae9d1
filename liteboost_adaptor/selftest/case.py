"""What one comparison runs: arguments of an op, made on the CPU; and the table of what makes them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

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
        text: As the C++ side spells it: ``"bf16"``, ``"bf16 offset"``.
        dtype: Of the tensors.
        layout: What follows the dtype: ``""``, ``"offset"``.
        seed: Another one gives other values.
    """

    text: str
    dtype: torch.dtype
    layout: str
    seed: int = 0
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


Maker = Callable[[Kind], Iterator[Case]]

#: For each op: its layout classes, and what makes the cases of one.
_MAKERS: dict[str, tuple[tuple[str, ...], Maker]] = {}


def makes_cases(op: str, *layouts: str) -> Callable[[Maker], Maker]:
    """Decorate the generator of an op's cases.

    Args:
        op: Name without namespace.
        layouts: The layout classes it makes cases for, as the kernel names them behind the dtype; ``""``,
            which is also the default, for an op that has but one.
    """

    def register(maker: Maker) -> Maker:
        _MAKERS[op] = (layouts or ("",), maker)
        return maker

    return register


def ops_with_cases() -> tuple[str, ...]:
    """Every op that can be compared."""
    return tuple(_MAKERS)


def kinds_of(op: str) -> list[str]:
    """Every kind that cases are made for: each dtype with each layout class."""
    layouts, _ = _MAKERS[op]
    return [f"{dtype} {layout}".strip() for layout in layouts for dtype in _dtypes_in(layout)]


def _dtypes_in(layout: str) -> list[str]:
    # No operator that we use takes fp32 in FRACTAL_NZ.
    return [dtype for dtype in DTYPES if not ("nz" in layout.split() and dtype == "fp32")]


def cases_of(op: str, kind: str, seed: int = 0) -> list[Case]:
    """The cases of an op and kind; none where nobody has written any.

    Args:
        op: Name without namespace.
        kind: A dtype of `DTYPES`, and behind it the layout class if the op has several.
        seed: Another one gives other values in the same shapes.
    """
    dtype, _, layout = kind.partition(" ")
    layouts, maker = _MAKERS.get(op, ((), None))
    if maker is None or layout not in layouts or dtype not in _dtypes_in(layout):
        return []
    return list(maker(Kind(kind, DTYPES[dtype], layout, seed)))
