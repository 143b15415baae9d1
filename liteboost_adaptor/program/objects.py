"""Where Python keeps what belongs to an object, and who made its class."""

from __future__ import annotations

import argparse
import collections
import copyreg
import functools
import gc
import types
from typing import Any

import torch

from . import trusted_code

MISSING = object()
#: Objects that are nothing but attributes.
NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
#: In a class, what says that it was written in C.
_IN_C = (type(object.__init__), type(str.join), types.ClassMethodDescriptorType)


def namespace_of(cls: type) -> dict[str, Any]:
    """The dict behind what a class shows as its ``__dict__``.

    Python keeps a class's slots there (``__slotnames__``) from the first time that an instance is copied or
    pickled. It is done here, lest a copy of a cache or ``torch.save`` of a tensor look like a change.
    """
    if type(cls).__setattr__ is type.__setattr__:
        copyreg._slotnames(cls)  # type: ignore[attr-defined]
    return next(each for each in gc.get_referents(vars(cls)) if type(each) is dict)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The dict that the attributes of an object are in."""
    try:
        own = object.__getattribute__(value, "__dict__")  # no code of the user's is run by looking
    except AttributeError:
        return None
    return own if type(own) is dict else None


def shows_another_dict(cls: type) -> bool:
    """Whether instances of ``cls`` show something else than their attributes as their ``__dict__``."""
    found = (vars(base)["__dict__"] for base in cls.__mro__ if "__dict__" in vars(base))
    return any(not isinstance(each, types.GetSetDescriptorType) for each in found)


def cell_content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned yet
        return MISSING


def slot_content(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return MISSING


@functools.lru_cache(maxsize=4096)
def is_written_in_c(cls: type) -> bool:
    """Whether ``cls`` itself was made in C: instances may hold what Python does not see."""
    if cls in (object, dict, list, tuple, set, frozenset, int, float, str, bytes, collections.OrderedDict):
        return False
    if not cls.__flags__ & (1 << 9):  # Py_TPFLAGS_HEAPTYPE
        return True
    if type(cls).__name__ in ("pybind11_type", "nb_type_0", "nb_type"):
        return True
    own = vars(cls).values()
    if any(isinstance(each, _IN_C) and getattr(each, "__objclass__", None) is cls for each in own):
        return True
    return any(
        is_written_in_c(base) for base in cls.__bases__ if base.__module__ not in ("builtins", "typing")
    )


def is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def keeps_to_itself(cls: type) -> bool:
    """Whether ``cls`` is torch's or of Python's library, and no user puts data into its attributes."""
    if cls in NAMESPACES or issubclass(cls, torch.nn.Module):
        return False
    return trusted_code.is_fixed(cls.__module__) or (
        trusted_code.is_standard(cls.__module__) and not trusted_code.is_harmless(cls.__module__)
    )
