"""The table of fuzzed ops: how a case of each is drawn, and what its result must be.

To add an op, write in `cases/FAMILY.py` a function that draws a `Case`, decorated with ``@fuzzes("name")``:
tensors from `tensors`, the check from `bounds`. ``test_every_op_is_fuzzed`` fails for an op without one.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor


@dataclass(repr=False)
class Case:
    """One call of an op.

    Attributes:
        arguments: By the names of the schema.
        check: Takes the list of results, and behind them of the arguments that the op writes into, which in
            `arguments` are still as they were; raises AssertionError where one is wrong.
    """

    arguments: dict[str, Any]
    check: Callable[[list[Tensor]], None]

    def __repr__(self) -> str:
        return describe(self.arguments)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What hypothesis shows of a failing case."""
        printer.text(repr(self))


#: Op name -> the strategy that draws its cases.
CASES: dict[str, st.SearchStrategy[Case]] = {}


def fuzzes(name: str) -> Callable[[Callable[[DrawFn], Case]], Callable[[DrawFn], Case]]:
    """Record the decorated function as what draws cases of the op ``name``."""

    def record(draw_case: Callable[[DrawFn], Case]) -> Callable[[DrawFn], Case]:
        assert name not in CASES, f"{name} is in the table already"
        CASES[name] = st.composite(draw_case)()
        return draw_case

    return record


def load() -> dict[str, st.SearchStrategy[Case]]:
    """The whole table, every module of `cases` imported."""
    package = importlib.import_module("fuzz.cases")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"fuzz.cases.{module.name}")
    return CASES


def describe(arguments: dict[str, Any]) -> str:
    """Arguments with the layout of their tensors instead of the values."""
    return ", ".join(f"{name}={_text(value)}" for name, value in arguments.items())


def _text(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    layout = f"strides {tuple(value.stride())} offset {value.storage_offset()}"
    dtype = str(value.dtype).removeprefix("torch.")
    return f"<{dtype} {tuple(value.shape)} {layout} of {value.untyped_storage().nbytes()} bytes>"


def op(name: str) -> Callable[..., Any]:
    """The registered op, whichever library serves it."""
    return getattr(torch.ops.liteboost, name)
