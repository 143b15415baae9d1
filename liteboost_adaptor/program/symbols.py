"""Lengths of a step that are others in every run: torch's symbols for them, and what was decided by them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

from .recording import CannotLower, Length, Place


class _Shapes(ShapeEnv):
    """Symbols that are made by us alone."""

    def _get_user_frame(self) -> None:
        """Which line of a user's asks for a symbol: none. To look for it torch imports its compiler."""


class Symbols:
    """Those of one recording.

    Attributes:
        fakes: The mode in which operators compute with them.
        places: What each symbol, by its position in `all`, is the value of; one may have several.
    """

    def __init__(self) -> None:
        self._shapes = _Shapes(duck_shape=False)
        self.fakes = FakeTensorMode(shape_env=self._shapes)
        self.places: list[tuple[int, Place]] = []
        self._made: dict[int, torch.SymInt] = {}

    def of(self, value: int, place: Place) -> torch.SymInt:
        """A symbol that is ``value`` in this step, the same one for equal values."""
        if value not in self._made:
            source = ConstantSource(f"length_{len(self._made)}")
            made = self._shapes.create_symbol(value, source, DimDynamic.DYNAMIC, constraint_dim=None)
            symbol = self._shapes.create_symintnode(made, hint=value, source=source)
            self._made[value] = cast(torch.SymInt, symbol)  # an int only of a number
        self.places.append((list(self._made).index(value), place))
        return self._made[value]

    def known(self, value: int) -> torch.SymInt:
        """The symbol that was made for ``value``."""
        return self._made[value]

    def shaped(self, real: torch.Tensor, lengths: Mapping[int, Any], capacities: Mapping[int, Any]) -> Any:
        """What has the sizes of ``real`` with symbols for some, and no values.

        Args:
            lengths: By dimension the symbol for its size.
            capacities: The same of the memory that ``real`` lies in; there strides are products of these.
        """
        sizes: list[Any] = [*real.shape]
        for dim, length in lengths.items():
            sizes[dim] = length
        strides: list[Any] = [1] * real.dim()
        step: Any = 1
        for at in sorted(range(real.dim()), key=lambda at: (real.stride(at), -at)):
            strides[at] = step if real.stride(at) else 0
            step = step * capacities.get(at, real.shape[at])
        with self.fakes:
            return torch.empty_strided(sizes, strides, dtype=real.dtype, device=real.device)

    def all(self) -> list[Any]:
        """As sympy has them, in the order they were made."""
        return [value.node._expr for value in self._made.values()]

    def length_of(self, key: tuple[int, str]) -> Any:
        """The symbol of how long a layer's tensor was."""
        return self.all()[
            next(
                index
                for index, place in self.places
                if (place.kind, place.holder, place.name) == ("length", *key)
            )
        ]

    def conditions(self) -> Callable[..., bool]:
        """Of the symbols' values, in the order they were made: whether Python would decide as it did."""
        decided = dict.fromkeys(guard.expr for guard in self._shapes.guards)
        # Sizes of 0 and 1 are decided by without a note.
        large = [symbol > 1 for symbol in self.all()]
        text = " and ".join(f"({text})" for text in self._texts([*decided, *large])) or "True"
        holds = self._function(text)
        try:
            is_so = holds(*self._made)
        except Exception as fault:
            raise CannotLower(f"decides by a length in a way of its own ({type(fault).__name__})") from fault
        if not is_so:
            raise CannotLower("decides by a length otherwise than it did")
        return holds

    def expressions(self, lengths: list[Length | int]) -> Callable[..., tuple[int, ...]]:
        """The values of ``lengths`` from those of the symbols."""
        texts = self._texts([sympy.sympify(getattr(length, "expression", length)) for length in lengths])
        return self._function(f"({''.join(f'{text}, ' for text in texts)})")

    def _texts(self, expressions: list[Any]) -> list[str]:
        names = {symbol: sympy.Symbol(f"v{at}") for at, symbol in enumerate(self.all())}
        return [PythonPrinter().doprint(each.xreplace(names)) for each in expressions]

    def _function(self, text: str) -> Callable[..., Any]:
        parameters = ", ".join(f"v{at}" for at in range(len(self._made)))
        return eval(f"lambda {parameters}: {text}", {"math": math, "torch": torch, "Min": min, "Max": max})
