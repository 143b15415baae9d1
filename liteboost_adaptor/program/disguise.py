"""What stands for tensors and sizes while a step is recorded, seen by the model's code as that.

Code that asks ``isinstance(n, int)`` of a size, or ``type(x)`` of a tensor, gets the answer that it gets in
any other step. torch, and what it computes with symbols by, goes on seeing symbols.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import trusted_code
from .bytecode import names_of
from .execution import Execution

_ASKED = "__getattribute__"
#: Held while a step is recorded: what is put in the place of types is seen, and taken back, for all threads.
one_at_a_time = threading.Lock()
_PLAIN: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


@contextmanager
def disguised(ran: Execution, stands_for_a_tensor: type) -> Iterator[None]:
    """In the block, symbols and objects of ``stands_for_a_tensor`` tell the model's code no other class.

    Whoever enters it holds `one_at_a_time`.

    Args:
        ran: What Python ran in a former step.
        stands_for_a_tensor: A subclass of tensors; its ``__class__`` says so itself.
    """
    shim = _shim(stands_for_a_tensor)
    spaces = [ran.codes[code] for code in ran.unread() if "type" in names_of(code).globals]
    spaces = [space for space in {id(each): each for each in spaces}.values() if "type" not in space]
    for symbolic, plain in _PLAIN.items():
        setattr(symbolic, _ASKED, _attributes_of(plain))
    for space in spaces:
        space["type"] = shim
    try:
        yield
    finally:
        for space in spaces:
            del space["type"]
        for symbolic in _PLAIN:
            delattr(symbolic, _ASKED)


def asks_for_types(codes: list[types.CodeType]) -> bool:
    """Whether any of ``codes`` may ask for the type of what it is given."""
    return any("type" in names_of(code).globals for code in codes)


def _attributes_of(plain: type) -> Callable[[Any, str], Any]:
    def get(self: Any, name: str) -> Any:
        if name == "__class__" and not _is_of_torch(sys._getframe(1)):
            return plain
        return object.__getattribute__(self, name)

    return get


def _is_of_torch(frame: types.FrameType | None) -> bool:
    """Whether torch asks, or what it computes by: also through Python's library (``numbers.Integral``)."""
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if not trusted_code.is_standard(module):
            return trusted_code.is_fixed(module) or trusted_code.is_below(module)
        frame = frame.f_back
    return True


def _shim(stands_for_a_tensor: type) -> type:
    """What ``type`` is to functions that have to be read."""
    plain = {**_PLAIN, stands_for_a_tensor: torch.Tensor}

    class Shim(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            made = type(*args, **kwargs)
            return plain.get(made, made) if len(args) == 1 else made

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, type)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, type)

    return Shim("type", (type,), {})
