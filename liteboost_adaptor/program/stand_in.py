"""What stands, while a step is recorded, for an argument that no forward names: ``tokenizer=``, a list.

transformers hands on such keywords from function to function, and a forward that reads none of them may get
any object. A stand-in notes whoever asks it for anything, so a step that was recorded with one does the same
with every object of that type. Who compares it by ``is`` or asks for its ``type`` is not noted: so stand-ins
serve only where all code that runs is known (`trusted_code.is_known`), which does neither.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

#: Methods that Python calls on behalf of an operator or a function, and does not look up as attributes.
_IMPLICIT = (
    *("bool", "len", "length_hint", "iter", "next", "reversed", "contains", "getitem", "setitem", "delitem"),
    *("call", "enter", "exit", "await", "aiter", "anext", "eq", "ne", "lt", "le", "gt", "ge", "hash"),
    *("repr", "str", "format", "bytes", "int", "float", "complex", "index", "round", "fspath", "dir"),
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv"),
    *("mod", "rmod", "pow", "rpow", "matmul", "rmatmul", "and", "rand", "or", "ror", "xor", "rxor"),
    *("lshift", "rlshift", "rshift", "rrshift", "divmod", "rdivmod", "neg", "pos", "abs", "invert"),
    *("get", "set", "delete", "setattr", "delattr", "getattribute", "instancecheck", "subclasscheck"),
)


class ReadsArgument(Exception):
    """A step reads an argument for which there is a stand-in."""


class StandIn:
    """Stands for one argument.

    Args:
        name: Of the argument.
        read: Where the names are noted of those that were asked for anything.
    """

    __slots__ = ("__weakref__", "_name", "_read")

    def __init__(self, name: str, read: list[str]) -> None:
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_read", read)


def _raising(self: StandIn, *args: Any, **kwargs: Any) -> NoReturn:
    name = object.__getattribute__(self, "_name")
    object.__getattribute__(self, "_read").append(name)
    raise ReadsArgument(f"reads {name}")


for _each in _IMPLICIT:
    setattr(StandIn, f"__{_each}__", _raising)


class StandIns:
    """Those of one step. Nobody but who is given one holds it."""

    def __init__(self) -> None:
        self._read: list[str] = []
        self._made: list[tuple[str, weakref.ref[StandIn]]] = []

    def __bool__(self) -> bool:
        return bool(self._made)

    def of(self, name: str) -> StandIn:
        """One for the argument ``name``."""
        made = StandIn(name, self._read)
        self._made.append((name, weakref.ref(made)))
        return made

    def fault(self) -> str:
        """Who has read one, or keeps one now that the step is over, or an empty string."""
        if self._read:
            return f"reads {self._read[0]}"
        return next((f"keeps {name}" for name, made in self._made if made() is not None), "")
