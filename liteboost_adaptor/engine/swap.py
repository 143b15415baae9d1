"""Give one module instance a subclass of its own class, and take it away again.

A subclass of the same name keeps ``isinstance``, ``state_dict``, gradient checkpointing and everything
that looks at class names; the class itself, and every other instance of it, stays untouched.
"""

from __future__ import annotations

import copyreg
import types
from typing import Any

import torch

MARKER = "__liteboost__"


def subclass(original: type, methods: dict[str, Any], mark: Any) -> type:
    """A subclass of ``original`` of the same name, with ``methods``; pickles and copies as the original."""

    def reduce_as_original(self: Any, protocol: Any) -> Any:
        # A pickle or a deep copy holds the original class: it must load where this package is not.
        reduced = super(made, self).__reduce_ex__(protocol)
        if not isinstance(reduced, tuple):
            return reduced
        if reduced[0] is copyreg.__newobj__ and reduced[1] == (made,):
            # pickle insists that __newobj__ makes the object's present class; this makes the other.
            return (copyreg._reconstructor, (original, object, None), *reduced[2:])
        arguments = tuple(original if argument is made else argument for argument in reduced[1])
        return (reduced[0], arguments, *reduced[2:])

    def make_an_original(cls: type, *args: Any, **kwargs: Any) -> Any:
        # `type(model)(config)` means the class the user wrote, and a new model is bound when it is used.
        return original(*args, **kwargs) if cls is made else object.__new__(cls)

    namespace = {
        **methods,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__reduce_ex__": reduce_as_original,
        "__new__": make_an_original,
        MARKER: mark,
    }
    # Made beside the original and moved under it: a direct subclass would run its __init_subclass__, which
    # is for classes people write (it registers plug-ins, wraps methods once more, reads annotations).
    made = types.new_class(
        original.__name__,
        (torch.nn.Module,),
        {"metaclass": type(original)},
        lambda body: body.update(namespace),
    )
    made.__bases__ = (original,)
    return made


def mark_of(module: torch.nn.Module) -> Any:
    """What `subclass` was given for the class of ``module``, or ``None`` if the class is not ours."""
    return vars(type(module)).get(MARKER)


def swap(module: torch.nn.Module, made: type) -> None:
    """Make ``module`` an instance of ``made``, a direct subclass of its class."""
    module.__class__ = made


def restore(module: torch.nn.Module) -> bool:
    """Give ``module`` its own class back. False when someone else has changed it since; theirs is left."""
    if mark_of(module) is None:
        return False
    module.__class__ = type(module).__bases__[0]
    return True
