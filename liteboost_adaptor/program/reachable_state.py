"""What Python code could have read, listed by how it is compared."""

from __future__ import annotations

import collections
import datetime
import pathlib
import re
import types
from dataclasses import dataclass, field
from typing import Any

import torch

#: Values that are what they are: another one is another object, or equal.
PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, re.Pattern),
    *(
        datetime.datetime,
        datetime.date,
        datetime.timedelta,
        pathlib.PurePath,
        types.GenericAlias,
        types.UnionType,
    ),
    *(types.CodeType, torch.finfo, torch.iinfo),
)


@dataclass
class Reached:
    """What was found, each kept alive.

    Attributes:
        dicts, lists, sets, queues, empty: Containers; ``empty``: dicts with nothing in them.
        namespaces: Of classes: the class -> the dict behind its ``__dict__``.
        named: (globals or a module's attributes, name, value or `MISSING`).
        spaces: Globals of modules that may be asked for any name: which names there are is compared.
        cells: Of closures, with what they hold.
        slots: (object, name, value or `MISSING`) of attributes in slots.
        functions: With their code, defaults, keyword defaults and closure.
        described: (object, name, value): a name or annotations of a function or class, parts of a partial.
        objects: Modules, also those that are not in the model, tensors, and whatever else has a class of
            its own.
        tensors: All that existed.
        fault: Something that code which had to be read may use, and whose state nobody can see.
    """

    dicts: list[dict[Any, Any]] = field(default_factory=list)
    lists: list[list[Any]] = field(default_factory=list)
    sets: list[set[Any]] = field(default_factory=list)
    queues: list[collections.deque[Any]] = field(default_factory=list)
    empty: list[dict[Any, Any]] = field(default_factory=list)
    namespaces: dict[type, dict[str, Any]] = field(default_factory=dict)
    named: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    spaces: list[dict[str, Any]] = field(default_factory=list)
    cells: list[tuple[types.CellType, Any]] = field(default_factory=list)
    slots: list[tuple[Any, str, Any]] = field(default_factory=list)
    functions: list[types.FunctionType] = field(default_factory=list)
    described: list[tuple[Any, str, Any]] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    fault: str = ""
