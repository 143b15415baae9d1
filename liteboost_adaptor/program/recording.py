"""What a recorded step consists of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

#: No property of the step: the next one may be recorded.
MOVED = "what is kept moves to a larger buffer"
SHORT = "what is kept has one position, and torch's symbols count from two"

#: First words of the namespaces of torch's operators, and of ours.
_NAMESPACES = frozenset(
    {
        *("aten", "prims", "quantized", "onednn", "mkldnn", "mkl", "prepacked", "fbgemm", "torchao"),
        *("liteboost", "c10d", "", "npu"),
    }
)


class CannotLower(Exception):
    """A program has no instruction for it. The message says for what."""


@dataclass(frozen=True)
class Slot:
    """A tensor of the recording, by number."""

    number: int


@dataclass(frozen=True)
class Length:
    """A number of the recording: a sympy expression of symbols."""

    expression: Any


@dataclass
class Call:
    """``results = function(*args, **kwargs)``, with `Slot` for tensors and `Length` for symbols."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[int]
    is_list: bool = False


@dataclass
class Appended:
    """``result`` = what a holder keeps as ``name``, and ``new`` behind it, ``count`` long along ``dim``."""

    holder: int
    name: str
    new: int
    dim: int
    count: int | Length
    result: int


@dataclass(frozen=True)
class Expected:
    """Python read a truth value and decided by it: the calls behind this one are right if it is the same."""

    slot: int
    value: bool


@dataclass(frozen=True)
class Place:
    """What a symbol is the value of.

    Attributes:
        kind: ``length`` or ``capacity`` of what a holder keeps as ``name``, ``number`` kept so, ``input``:
            the size along ``dim`` of the argument ``name``, or ``argument``: that argument, a number.
        name: What the holder keeps it as, or that of the argument.
        holder: Its index, or -1.
        dim: Of the size.
    """

    kind: str
    name: Any
    holder: int = -1
    dim: int = -1


@dataclass
class Recording:
    """What ran, and what it started from.

    Attributes:
        calls: In order.
        constants: Slot -> a tensor that nothing made: parameters, buffers.
        inputs: Arguments, name -> slot.
        held: What was kept before, (holder, name) -> slot.
        tensors: Slot -> the tensor itself, for `inputs` and `held`.
        of_any_size: Slots of `inputs` that no other size depends on.
        aliases: Slot -> another one for the same tensor, which the calls name in its place.
        count: Of slots.
        is_reformed: Whether an operator has changed the form of a tensor that was there before it: then a
            slot had other sizes when a call read it than it has at the end.
        fault: Why this is no recording of a step that can be repeated.
    """

    calls: list[Call | Appended | Expected] = field(default_factory=list)
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    inputs: dict[str, int] = field(default_factory=dict)
    held: dict[tuple[int, Any], int] = field(default_factory=dict)
    tensors: dict[int, Any] = field(default_factory=dict)
    of_any_size: set[int] = field(default_factory=set)
    aliases: dict[int, int] = field(default_factory=dict)
    count: int = 0
    is_reformed: bool = False
    fault: str = ""

    def new(self) -> int:
        self.count += 1
        return self.count - 1


def is_foreign(func: Any) -> bool:
    """Whether an operator is neither torch's nor ours: what it does beside its result nobody knows."""
    return func.namespace.split("_")[0] not in _NAMESPACES
