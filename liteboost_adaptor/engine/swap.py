"""Give one module instance a subclass of its own class, and take it away again.

A subclass of the same name keeps ``isinstance``, ``state_dict``, gradient checkpointing and everything
that looks at class names; the class itself, and every other instance of it, stays untouched.
"""

from __future__ import annotations

import abc
import copy
import copyreg
import functools
import types
from typing import Any

import torch
from torch.nn.utils import parametrize

MARKER = "__liteboost__"
#: What an instance keeps for us begins so, and is left out of copies and pickles.
PRIVATE = "_liteboost_"
#: What ``object.__reduce_ex__`` makes an object by, and what makes one of a class that need not be its own.
_NEW_OBJECT = copyreg.__newobj__  # type: ignore[attr-defined] # not in typeshed
_RECONSTRUCTOR = copyreg._reconstructor  # type: ignore[attr-defined] # not in typeshed


def subclass(original: type, methods: dict[str, Any], mark: Any) -> type:
    """A subclass of ``original`` of the same name, with ``methods``; pickles and copies as the original."""

    def reduce_as_original(self: Any, protocol: Any) -> Any:
        # A pickle or a deep copy holds the original class: it must load where this package is not.
        reduced = super(made, self).__reduce_ex__(protocol)
        if not isinstance(reduced, tuple):
            return reduced
        if len(reduced) > 2 and isinstance(reduced[2], dict):
            kept = {name: value for name, value in reduced[2].items() if not str(name).startswith(PRIVATE)}
            state = {**kept, **_rebound(self, kept, _functions(made), original)}
            reduced = (*reduced[:2], state, *reduced[3:])
        if reduced[0] is _NEW_OBJECT and reduced[1] == (made,):
            # pickle insists that __newobj__ makes the object's present class; this makes the other.
            return (_RECONSTRUCTOR, (original, object, None), *reduced[2:])
        arguments = tuple(original if argument is made else argument for argument in reduced[1])
        return (reduced[0], arguments, *reduced[2:])

    namespace = {
        **methods,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__reduce_ex__": reduce_as_original,
        MARKER: mark,
    }
    # Made beside the original and moved under it: a direct subclass would run its __init_subclass__, which
    # is for classes people write (it registers plug-ins, wraps methods once more, reads annotations).
    beside = torch.nn.Module if issubclass(original, torch.nn.Module) else _Beside
    made: type[Any] = types.new_class(
        original.__name__,
        (beside,),
        {"metaclass": _metaclass(type(original))},
        lambda body: body.update(namespace),
    )
    made.__bases__ = (original,)
    return made


class _Beside(abc.ABC):  # noqa: B024 - python lets bases be exchanged only where instances are laid out alike
    """What a class of ours is first made a subclass of, where its original is no module but a cache layer."""


@functools.cache
def _metaclass(base: type) -> type:
    """A metaclass under which calling a subclass of ours makes an instance of the original.

    ``type(model)(config)`` means the class the user wrote; a new model is bound when it is used.
    """

    def make_an_original(cls: type, *args: Any, **kwargs: Any) -> Any:
        if MARKER in vars(cls):
            return cls.__bases__[0](*args, **kwargs)
        return base.__call__(cls, *args, **kwargs)

    made = type(base.__name__, (base,), {"__call__": make_an_original})
    copyreg.pickle(made, _reduce_class)
    return made


def _reduce_class(cls: type) -> Any:
    """A pickle of a subclass of ours, as of ``type(model)``, holds the original class."""
    if MARKER not in vars(cls):
        return cls.__qualname__  # a class that somebody derived from ours is found by its name, as any is
    return copy.copy, (cls.__bases__[0],)  # a copy of a class is the class


def mark_of(module: torch.nn.Module) -> Any:
    """What `subclass` was given for the class of ``module``, or ``None`` if the class is not ours."""
    return vars(type(module)).get(MARKER)


def mark_beneath(module: torch.nn.Module) -> Any:
    """The mark of a subclass of ours beneath a class that torch's parametrize made of it, or ``None``.

    Such a class is made for one instance; any other on top of ours may be shared and is left.
    """
    cls = type(module)
    is_for_one = (
        "parametrizations" in getattr(module, "_modules", ()) and cls.__module__ == parametrize.__name__
    )
    return vars(cls.__bases__[0]).get(MARKER) if is_for_one else None


def original_class(module: torch.nn.Module) -> type:
    """The class of ``module``, looking through a subclass of ours."""
    cls = type(module)
    return cls.__bases__[0] if MARKER in vars(cls) else cls


def swap(module: torch.nn.Module, made: type) -> None:
    """Make ``module`` an instance of ``made``, a direct subclass of its class."""
    original = type(module)
    module.__class__ = made
    _rebind(module, {getattr(original, name): name for name in _functions(made).values()}, made)


def restore(module: torch.nn.Module) -> bool:
    """Give ``module`` its own class back. False when someone else has changed it since; theirs is left."""
    made: type
    if mark_of(module) is not None:
        made = type(module)
        module.__class__ = original = made.__bases__[0]
    elif mark_beneath(module) is not None:
        made = type(module).__bases__[0]
        type(module).__bases__ = (original := made.__bases__[0],)
    else:
        return False
    _rebind(module, _functions(made), original)
    return True


def shed_leftover(module: torch.nn.Module) -> None:
    """Remove a ``forward`` kept on the instance that is the one of its class, and says nothing.

    transformers leaves one behind (up to 5.1) wherever it has recorded attention weights or hidden states.
    """
    found = vars(module).get("forward")
    if is_own_forward(module, found):
        del vars(module)["forward"]


def is_own_forward(module: torch.nn.Module, found: Any) -> bool:
    """Whether ``found``, kept on the instance, is no other ``forward`` than the class's."""
    return (
        type(found) is types.MethodType
        and found.__self__ is module
        and found.__func__ is getattr(type(module), "forward", None)
    )


def hides_forward(module: torch.nn.Module) -> bool:
    """Whether a forward put on the instance would keep one of ours from being called.

    A wrapper that calls the bound method it found, and holds it in another attribute, would not: accelerate's
    hooks, which every ``device_map`` of several places puts on all modules.
    """
    own = vars(module)
    if "forward" not in own:
        return False
    found = getattr(own["forward"], "__wrapped__", None)
    return not (is_own_forward(module, found) and any(value == found for value in own.values()))


def _rebind(module: torch.nn.Module, functions: dict[Any, str], cls: type) -> None:
    """Make bound methods of ``functions`` that the instance holds those of ``cls``."""
    vars(module).update(_rebound(module, vars(module), functions, cls))


def _rebound(
    module: torch.nn.Module, values: dict[str, Any], functions: dict[Any, str], cls: type
) -> dict[str, Any]:
    """Those of ``values`` that are methods of ``functions`` bound to ``module``, as methods of ``cls``."""
    return {
        name: types.MethodType(getattr(cls, functions[value.__func__]), module)
        for name, value in values.items()
        if type(value) is types.MethodType and value.__self__ is module and value.__func__ in functions
    }


def _functions(made: type) -> dict[Any, str]:
    """The plain functions of a subclass of ours, with their names."""
    return {value: name for name, value in vars(made).items() if type(value) is types.FunctionType}


def is_below_ours(module: torch.nn.Module) -> bool:
    """Whether someone has put a class of theirs on top of a subclass of ours."""
    return any(MARKER in vars(cls) for cls in type(module).__mro__[1:])
