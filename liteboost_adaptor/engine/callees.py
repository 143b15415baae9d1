"""The places a function looks its callees up in: replaced there, they make it compute something else.

A replacement stands for the whole body of its original, with everything that body calls by a name:
functions of torch, methods and operators of tensors, the calls of child modules, functions of the library
that wrote it. Its bytecode is read (`lookups`), and read too much rather than too little: an attribute of a
local value counts as one of a tensor if tensors have one of that name.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from ..watch import Place, place_in_class, place_in_module
from . import source, swap
from .lookups import lookups

#: Modules of torch whose Python functions are read, too; of others the name is what they do.
_READ_IN_TORCH = ("torch.nn.functional", "torch.functional", "torch._tensor", "torch.nn.modules")
#: Modules beside torch that hold no arithmetic: what is in them may be watched, but need not be read.
_NOT_READ = (
    *("transformers.utils", "logging", "warnings", "typing", "importlib", "functools", "packaging"),
    *("liteboost_adaptor.eligibility", "liteboost_adaptor.report", "liteboost_adaptor.watch"),
)
#: How many functions deep an original is read, and a replacement.
_DEEPEST, _DEEPEST_OF_OURS = 6, 3
_LARGEST_TABLE = 100
#: What torch asks of every tensor that is handed to one of its functions.
_OF_TENSORS = ("__torch_function__", "__torch_dispatch__")
#: What stands between ``module(x)`` and its forward.
_OF_CALLS = ("__call__", "_wrapped_call_impl", "_call_impl", "forward")
#: Attribute of an entry of ours that holds the one it was put in the place of.
ORIGINAL = "__liteboost_original__"
_MISSING = object()


def of_function(function: Any, owner: type | None = None, instance: Any = None) -> list[Place]:
    """The places that ``function`` reads, and the functions it calls.

    Args:
        function: A function, or a method where ``owner`` is the class that ``self`` will have.
        owner: That class.
        instance: A module of it, whose children's calls count, too.
    """
    reader = _Reader()
    while hasattr(function, ORIGINAL):  # an entry of ours, of which a second rule makes one
        function = getattr(function, ORIGINAL)
    reader.read(function, owner, instance, 0)
    return reader.found()


def of_replacement(made: Any) -> list[Place]:
    """What a replacement of ours calls by itself of torch and of tensors: that may be replaced, too."""
    reader = _Reader()
    reader.read(made, None, None, _DEEPEST - _DEEPEST_OF_OURS)
    return [place for place in reader.found() if place.is_torch and _computes(place.value())]


def of_call(module: torch.nn.Module) -> list[Place]:
    """The places that ``module(x)`` reads."""
    reader = _Reader()
    reader.call_of(module, 0)
    return reader.found()


def of_operators(*names: str) -> list[Place]:
    """The places of operators between tensors, such as ``mul``: the operator itself and its reflection."""
    return [place_in_class(torch.Tensor, f"__{prefix}{name}__") for name in names for prefix in ("", "r")]


class _Reader:
    def __init__(self) -> None:
        self._places: dict[Place, None] = {}
        #: How deep each was read.
        self._read: dict[Any, int] = {}

    def found(self) -> list[Place]:
        """Everything that was read, and what torch asks of every tensor."""
        return [*self._places, *(place_in_class(torch.Tensor, name) for name in _OF_TENSORS)]

    def read(self, function: Any, owner: type | None, instance: Any, depth: int) -> None:
        """What ``function``, and every wrapper around it, reads."""
        if depth > min(_DEEPEST, self._read.get((function, owner), _DEEPEST + 1) - 1):
            return
        self._read[function, owner] = depth
        try:
            inner, wrappers = source.innermost(function), source.wrapper_chain(function)
        except source.SourceUnavailable:
            return
        for wrapper in filter(_is_read, wrappers):
            self.read(_bare(wrapper), None, None, depth + 1)
        _Body(self, inner, owner, instance, depth).read()

    def call_of(self, module: torch.nn.Module, depth: int) -> None:
        """What stands between a call of ``module`` and the end of its forward."""
        self._call_of_class(swap.original_class(module), module, depth)

    def _call_of_class(self, cls: type, module: torch.nn.Module | None, depth: int) -> None:
        for name in _OF_CALLS:
            self.note(place_in_class(cls, name))
        self.read(getattr(cls, "forward", None), cls, module, depth + 1)

    def table(self, values: dict[Any, Any], label: str, depth: int) -> None:
        """What a table of functions or of modules' classes, such as ``ACT2FN``, may be asked for."""
        for key, kept in list(dict.items(values)):
            value = kept[0] if isinstance(kept, tuple) and kept else kept
            is_module = isinstance(value, type) and issubclass(value, torch.nn.Module)
            if type(key) is not str or not (is_module or type(value) is types.FunctionType):
                continue
            self._places.setdefault(Place(values, key, label))
            if is_module:
                self._call_of_class(value, None, depth)
            else:
                self.follow(value, depth)

    def note(self, place: Place) -> Any:
        """Note a place, and give what is there."""
        if place.space is not _builtins().__dict__:
            self._places[place] = None
        return place.value()

    def follow(self, value: Any, depth: int) -> None:
        """Read a function that is called, where it may do more than its name says."""
        if type(value) is types.FunctionType and _is_read(value):
            self.read(value, None, None, depth + 1)


class _Body:
    """One function's code, and what its names stand for."""

    def __init__(
        self, reader: _Reader, function: types.FunctionType, owner: type | None, instance: Any, depth: int
    ) -> None:
        self.reader, self.function, self.owner, self.instance = reader, function, owner, instance
        self.depth = depth

    def read(self) -> None:
        found = lookups(self.function.__code__)
        for name in filter(functools.partial(hasattr, torch.Tensor), found.operators):
            self.reader.note(place_in_class(torch.Tensor, name))
        for path in found.paths:
            self._path(path)
        owner = self.owner
        for name in found.of_first:
            self._of_tensors(name) if owner is None else self._of_self(owner, name)
        for name in found.of_super:
            self._of_tensors(name) if owner is None else self._of_super(owner, name)
        for name in found.of_values:
            self._of_tensors(name)

    def _of_tensors(self, name: str) -> None:
        """An attribute of a value that may be a tensor."""
        if hasattr(torch.Tensor, name):
            self.reader.follow(self.reader.note(place_in_class(torch.Tensor, name)), self.depth)

    def _global(self, name: str) -> Any:
        """What a name that is no local stands for; its place is noted."""
        function = self.function
        cell = source.free_cells(function).get(name)
        if cell is not None:
            value = _contents(cell)
        elif name in function.__globals__ or not hasattr(_builtins(), name):
            value = self.reader.note(place_in_module(function.__globals__, name))
        else:
            return getattr(_builtins(), name)
        self.reader.follow(value, self.depth)
        if isinstance(value, dict) and len(value) <= _LARGEST_TABLE:
            self.reader.table(value, f"{function.__globals__.get('__name__')}.{name}", self.depth)
        return value

    def _path(self, path: tuple[str, ...]) -> None:
        """A name that is no local, and what is asked of it: of modules and classes these are places."""
        value, *rest = self._global(path[0]), *path[1:]
        for name in rest:
            if isinstance(value, types.ModuleType):
                value = self.reader.note(place_in_module(vars(value), name))
            elif isinstance(value, type):
                value = self.reader.note(place_in_class(value, name))
            else:
                self._of_object(value, name)
                value = _MISSING
                continue
            self.reader.follow(value, self.depth)

    def _of_object(self, held: Any, name: str) -> None:
        method = getattr(type(held), name, None) if _is_ours(held) else None
        if type(method) is types.FunctionType:
            self.reader.read(method, type(held), None, self.depth + 1)
        else:
            self._of_tensors(name)

    def _of_self(self, owner: type, name: str) -> None:
        place = place_in_class(owner, name)
        value = place.value()
        if type(value) is types.FunctionType or isinstance(value, (classmethod, staticmethod, property)):
            self.reader.note(place)
            if type(value) is types.FunctionType:
                self.reader.read(value, owner, self.instance, self.depth + 1)
            return
        # An attribute of the instance, until the class gets one that is found before it (a property).
        for each in (name, "__getattribute__", "__getattr__"):
            if each == name or hasattr(owner, each):
                self.reader.note(place_in_class(owner, each))
        child = vars(self.instance).get("_modules", {}).get(name) if self.instance is not None else None
        held = vars(self.instance).get(name) if self.instance is not None else None
        if isinstance(child, torch.nn.Module):
            self.reader.call_of(child, self.depth + 1)
        elif type(held) is types.FunctionType:
            self.reader.read(held, None, None, self.depth + 1)

    def _of_super(self, owner: type, name: str) -> None:
        line, writer = owner.__mro__, self._global("__class__")
        bases = line[line.index(writer) + 1 :] if writer in line else ()
        base = next((cls for cls in bases if name in vars(cls)), None)
        if base is not None:
            value = self.reader.note(place_in_class(base, name))
            if type(value) is types.FunctionType:
                self.reader.read(value, owner, self.instance, self.depth + 1)


def _bare(wrapper: types.FunctionType) -> types.FunctionType:
    """A wrapper as the function it is, which says nothing of what it wraps."""
    bare = types.FunctionType(
        wrapper.__code__, wrapper.__globals__, wrapper.__name__, wrapper.__defaults__, wrapper.__closure__
    )
    bare.__kwdefaults__ = wrapper.__kwdefaults__
    return bare


def _is_read(function: types.FunctionType) -> bool:
    module = str(function.__globals__.get("__name__", ""))
    if module.split(".")[0] == "torch":
        return module.startswith(_READ_IN_TORCH)
    return not module.startswith(_NOT_READ)


def _computes(value: Any) -> bool:
    """Whether what is found is one of torch's compiled functions, or a method of tensors."""
    return callable(value) and not isinstance(value, (type, torch._ops.OpOverloadPacket))


def _is_ours(value: Any) -> bool:
    """Whether a replacement holds an object of ours, such as the form of a norm."""
    return type(value).__module__.startswith("liteboost_adaptor.replacements")


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the name is bound later
        return None


@functools.cache
def _builtins() -> types.ModuleType:
    import builtins

    return builtins
