"""Whether the functions that a replacement stands for are still torch's own, and nobody intercepts them.

A fused op does not call what its original calls. So whoever has replaced one of these functions, before us or
since, or has entered a function or dispatch mode, would not be asked. Each replacement therefore has a
`Watch` over the places its original reads (`engine.callees`), which is asked in every call and costs a
comparison of pointers a place. What decides is what is there at the time of the call: whoever takes a patch
back is served again.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils import _python_dispatch

from . import python_kernels

#: A mode of this attribute only observes what runs, and wants to see our ops.
OBSERVES = "sees_liteboost_ops"
#: Packages whose functions in torch's namespaces are taken for torch's own: a device's own part of torch,
#: and ours.
_OWN_PACKAGES = ("torch", "torch_npu", "liteboost_adaptor")
#: Torch's own names for functions that call themselves otherwise.
_ALIASES = {
    "__abs__": "abs",
    "__neg__": "neg",
    "__pos__": "positive",
    "__pow__": "pow",
    "__ipow__": "pow_",
    "__itruediv__": "__idiv__",
    "__rtruediv__": "__rdiv__",
    "__call__": "_wrapped_call_impl",
    "forward": "_forward_unimplemented",
    "logsigmoid": "log_sigmoid",
    "type_raw": "type",  # as torch_npu 2.9.0 keeps it
    "threshold": "_threshold",
    "__torch_dispatch__": "_disabled_torch_dispatch_impl",
    "has_torch_function": "_has_torch_function",
    "has_torch_function_unary": "_has_torch_function_unary",
    "has_torch_function_variadic": "_has_torch_function_variadic",
    "_sym_int": "sym_int",
    "_jit_unused": "unused",
}
#: Modules of torch that show functions of ``torch._C`` whose names begin with the module's.
_PREFIXED = ("torch.special", "torch.linalg", "torch.fft")
#: Where torch wraps functions of its own; a wrapper from anywhere else may hold anything.
_OWN_WRAPPERS = (
    *("torch._tensor", "torch._jit_internal", "torch.nn.functional"),
    *("torch._decomp.decompositions", "torch._prims_common.wrappers"),
)
#: By module: functions that torch makes of others, which all have this name wherever they are put.
_OWN_CLOSURES = {
    "torch.nn.modules.utils": "_ntuple.<locals>.parse",
    "torch._jit_internal": "boolean_dispatch.<locals>.fn",
}
_MISSING = object()


class Place(NamedTuple):
    """Where a function is looked up: a name in a module, a module's globals, or an attribute of a class.

    Attributes:
        space: The class, or the dictionary of the module.
        name: The name there.
        label: Module or class, for messages.
    """

    space: Any
    name: str
    label: str

    def __hash__(self) -> int:
        return hash((id(self.space), self.name))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and self.space is other.space and self.name == other.name

    def __ne__(self, other: object) -> bool:
        return not self == other  # a tuple's own would compare what is in the two spaces

    def __str__(self) -> str:
        return f"{self.label}.{self.name}"

    @property
    def is_torch(self) -> bool:
        """Whether what is there ought to be torch's own, whatever was there first."""
        return self.label.split(".")[0] == "torch"

    @property
    def searched(self) -> Any:
        """The class, or the dictionary, in which `found` looks."""
        if not isinstance(self.space, type) or getattr(self.space, self.name, _MISSING) is self.value():
            return self.space
        # A class method, for one, is made anew each time it is asked for; and metaclasses are asked, too.
        return next((vars(base) for base in self.space.__mro__ if self.name in vars(base)), vars(self.space))

    def entries(self) -> list[tuple[dict[str, Any], str]]:
        """Dictionaries and names that decide what is found.

        Of a class, every base up to the one that has it.
        """
        if not isinstance(self.space, type):
            return [(self.space, self.name)]
        entries = []
        for base in self.space.__mro__[:-1]:  # nobody can change `object`
            # What a class shows is a view of the dictionary in which its attributes are.
            entries.append((gc.get_referents(vars(base))[0], self.name))
            if self.name in vars(base):
                break
        return entries

    def found(self) -> Any:
        """What is compared from call to call."""
        space = self.searched
        return (
            getattr(space, self.name, _MISSING) if isinstance(space, type) else space.get(self.name, _MISSING)
        )

    def value(self) -> Any:
        """What is there now, as it is kept."""
        space, name = self.space, self.name
        if not isinstance(space, type):
            return space.get(name, _MISSING)
        for base in space.__mro__:  # written out: thousands of places are looked up as a model is bound
            names = base.__dict__
            if name in names:
                return names[name]
        return _MISSING


def place_in_module(names: dict[str, Any], name: str) -> Place:
    """The place of a global name."""
    return Place(names, name, str(names.get("__name__", "?")))


def place_in_class(cls: type, name: str) -> Place:
    """The place of an attribute of a class, wherever among its bases it is found."""
    return Place(cls, name, f"{cls.__module__}.{cls.__qualname__}")


#: Code that the engine has made of what files say: it names the same file, and stands for what is there.
rewritten: set[types.CodeType] = set()


class Watch:
    """Asks whether anything in ``places`` was replaced, or a mode intercepts what is called there.

    An instance is called: it returns the reason why the original has to run, or an empty string. Everything
    that does not belong to torch counts as it is when the watch is made, and has to stay that very object.

    Attributes:
        ask: What a call does, without the look-up of it.
    """

    def __init__(self, places: Iterable[Place]) -> None:
        self.places = tuple(dict.fromkeys(places))
        self._first = [(value, _code(value)) for value in map(Place.value, self.places)]
        # What was found when it was last looked for, and of functions, the code.
        self._held: list[Any] = []
        self._codes: list[Any] = []
        self._kernels, self._said = [-1, -1], [""]
        self._entries = [entry for place in self.places for entry in place.entries()]
        self._expected: list[Any] = []
        self._functions: list[types.FunctionType] = []
        self._function_codes: list[types.CodeType] = []
        self._said[0] = self._look_again()
        self.ask: Callable[[], str] = self._compiled() or self._written_out()
        _alive.add(self)

    def __call__(self) -> str:
        return self.ask()

    def _look_again(self) -> str:
        """The reason at this moment; asked where anything is not as it was when it was last asked."""
        if torch.compiler.is_compiling():  # torch replaces functions itself while it exports
            return ""
        self._held[:] = [place.found() for place in self.places]
        self._codes[:] = map(_code, self._held)
        self._expected[:] = [space.get(name, _MISSING) for space, name in self._entries]
        self._function_codes[:] = [function.__code__ for function in self._functions]
        self._said[0] = self._reason()
        self._kernels[:] = python_kernels.count()
        return self._said[0]

    def _reason(self) -> str:
        for place, (first, code) in zip(self.places, self._first, strict=True):
            value = place.value()
            if not _is_own(place, value, first) or (value is first and _code(value) is not code):
                return f"{place} was replaced by someone else"
        return python_kernels.someone_elses()

    def _compiled(self) -> Callable[[], str] | None:
        """`_look_again`, but only where something has changed, from C++; None where it is not to be had."""
        if not _libraries:
            return None
        # Functions only: what has no code now may get one, but is then another object.
        self._functions[:] = [value for value in self._held if _code(value) is not None]
        self._function_codes[:] = [function.__code__ for function in self._functions]
        spaces, names = [space for space, _ in self._entries], [name for _, name in self._entries]
        # Held for as long as the watch lives, which whoever asks has to keep.
        self._members = [spaces, names, self._expected, self._functions, self._function_codes]
        self._members += [
            torch.library._impls,
            python_kernels.registered,
            self._said,
            _MISSING,
            self._look_again,
            intercepting_mode,
        ]
        return _libraries[0].liteboost_watch(self._members)

    def _written_out(self) -> Callable[[], str]:
        """The same in Python, written out: a loop over the places would take three times as long."""
        names: dict[str, Any] = {f"s{n}": place.searched for n, place in enumerate(self.places)}
        tests = ["len(kernels) != count[0] or len(registered) != count[1]"]
        for n, place in enumerate(self.places):
            is_class, is_there = isinstance(place.searched, type), self._held[n] is not _MISSING
            is_there &= (
                is_class or type(place.searched) is dict
            )  # other tables may make what they are asked for
            if is_there:
                read = f"s{n}.{place.name}" if is_class else f"s{n}[{place.name!r}]"
            else:
                read = (
                    f"getattr(s{n}, {place.name!r}, missing)"
                    if is_class
                    else f"s{n}.get({place.name!r}, missing)"
                )
            tests.append(f"{read} is not held[{n}]")
            if self._codes[n] is not None:
                tests.append(f"held[{n}].__code__ is not codes[{n}]")
        names |= {"held": self._held, "codes": self._codes, "said": self._said, "missing": _MISSING}
        names |= {
            "kernels": torch.library._impls,
            "registered": python_kernels.registered,
            "count": self._kernels,
            "look_again": self._look_again,
            "mode": intercepting_mode,
        }
        names |= {
            "functions": torch._C._len_torch_function_stack,
            "dispatches": torch._C._len_torch_dispatch_stack,
        }
        text = _ASK.format(names=", ".join(names), tests=" or ".join(tests))
        made: dict[str, Any] = {"__name__": __name__}
        exec(compile(text, __file__, "exec"), made)
        return made["make"](**names)


_ASK = """
def make({names}):
    def ask():
        if functions() or dispatches():
            reason = mode()
            if reason:
                return reason
        try:
            if {tests}:
                return look_again()
        except (AttributeError, KeyError):
            return look_again()
        return said[0]
    return ask
"""


def _code(value: Any) -> types.CodeType | None:
    return value.__code__ if type(value) is types.FunctionType else None


#: The compiled kernels (``kernels/program/watch.cpp``), where they are loaded.
_libraries: list[ctypes.PyDLL] = []


def compile_with(path: str) -> None:
    """Have later watches compare in C++, by the compiled kernels at ``path``."""
    library = ctypes.PyDLL(path)
    if hasattr(library, "liteboost_watch"):
        library.liteboost_watch.argtypes = [ctypes.py_object]
        library.liteboost_watch.restype = ctypes.py_object
        _libraries[:] = [library]


_alive: weakref.WeakSet[Watch] = weakref.WeakSet()


def watched_places() -> tuple[Place, ...]:
    """The places of all watches there are: what replacements of this process stand for."""
    return tuple(dict.fromkeys(place for watch in list(_alive) for place in watch.places))


def intercepting_mode() -> str:
    """Why a mode that is active has to see the original's calls, or an empty string.

    Not asked of the modes by which torch traces, of the default device, and of those that only observe.
    """
    if torch.compiler.is_compiling():
        return ""
    for mode in _python_dispatch._get_current_dispatch_mode_stack():
        if getattr(mode, "_mode_key", None) is None and not _is_observing(mode):
            return f"a dispatch mode ({type(mode).__name__})"
    for mode in torch.overrides._get_current_function_mode_stack():
        if type(mode).__module__ not in _HARMLESS_MODES and not _is_observing(mode):
            return f"a function mode ({type(mode).__name__})"
    return ""


#: Modules of function modes by which torch traces, or chooses where tensors are made.
_HARMLESS_MODES = ("torch.utils._device", "torch.fx.experimental.proxy_tensor", "torch.export._trace")


def _is_observing(mode: Any) -> bool:
    return type(mode).__module__.split(".")[0] == "liteboost_adaptor" or getattr(mode, OBSERVES, False)


def _is_own(place: Place, value: Any, first: Any) -> bool:
    """Whether ``value`` is what the author put at ``place``; ``first``: what was there when first seen."""
    if first is _MISSING and _is_submodule(place, value):
        return True
    if not place.is_torch or not _can_be_judged(value):
        return value is first and _is_of_author(place, value)
    return _is_of_torch(value, place.name, place.space)


def _is_submodule(place: Place, value: Any) -> bool:
    """Whether ``value`` is a part of the package at ``place``, which has it since somebody imported it."""
    if not isinstance(value, types.ModuleType) or isinstance(place.space, type):
        return False
    return sys.modules.get(f"{place.space.get('__name__')}.{place.name}") is value


def _can_be_judged(value: Any) -> bool:
    return callable(value) or isinstance(value, (classmethod, staticmethod, property))


def _is_of_author(place: Place, value: Any) -> bool:
    """Whether a function found in a module or class of transformers was written there, or in torch.

    Elsewhere a body that was matched against the catalogue, with all it reaches, says what it is.
    """
    if place.label.split(".")[0] != "transformers":
        return True
    if isinstance(value, (classmethod, staticmethod)):
        value = value.__func__
    if type(value) is not types.FunctionType:
        return True
    package = _package(value)
    return package in ("transformers", *_OWN_PACKAGES) and _runs_its_file(value)


def _runs_its_file(function: types.FunctionType) -> bool:
    """Whether no code of another file was put into ``function``."""
    return function.__code__.co_filename == function.__globals__.get(
        "__file__", function.__code__.co_filename
    )


def _package(function: types.FunctionType) -> str:
    # Not __module__, which functools.wraps copies.
    return str(function.__globals__.get("__name__", "")).split(".")[0]


def _is_of_torch(value: Any, name: str, space: Any) -> bool:
    """Whether ``value`` is what torch (its part for a device, or this package) has under ``name``."""
    if isinstance(value, property):
        parts = [part for part in (value.fget, value.fset, value.fdel) if part is not None]
        return all(type(part) is types.FunctionType and _package(part) in _OWN_PACKAGES for part in parts)
    if isinstance(value, (classmethod, staticmethod)):
        value = value.__func__
    if type(value) is types.FunctionType:
        return _is_function_of_torch(value, name, space)
    if isinstance(value, type):
        package = value.__module__.split(".")[0]
        return package in (*_OWN_PACKAGES, "builtins", "typing") or _is_of_python(package, value, name)
    if isinstance(value, _OPERATORS):
        return isinstance(space, dict) and f"torch.ops.{value}" == f"{space.get('__name__')}.{name}"
    owner = getattr(value, "__objclass__", None)
    module = owner.__module__ if isinstance(owner, type) else getattr(value, "__module__", None)
    return (
        type(value) in _COMPILED
        and getattr(value, "__name__", "") in _names(name, space)
        and (module or "builtins").split(".")[0] in (*_OWN_PACKAGES, "builtins")
    )


def _names(name: str, space: Any) -> tuple[str | None, ...]:
    """What torch's function under ``name`` may call itself."""
    module = space.get("__name__") if isinstance(space, dict) else None
    return name, _ALIASES.get(name), f"{module[6:]}_{name}" if module in _PREFIXED else None


def _is_of_python(package: str, value: Any, name: str) -> bool:
    """Whether a function or class that a module of torch imports is that one of Python's own library."""
    return package in sys.stdlib_module_names and value.__name__ == name


#: Exactly these: a proxy (of wrapt, a mock) has the name and the module of what it stands before.
_COMPILED = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
)
_OPERATORS = (torch._ops.OpOverloadPacket, torch._ops.OpOverload)


def _is_function_of_torch(function: types.FunctionType, name: str, space: Any) -> bool:
    package = _package(function)
    wrapped = getattr(function, "__wrapped__", None)
    if package == "liteboost_adaptor":  # what level 0 puts right on an NPU; it calls what was there
        return wrapped is None or _is_of_torch(wrapped, name, space)
    if package not in _OWN_PACKAGES:
        return wrapped is None and _runs_its_file(function) and _is_of_python(package, function, name)
    if package == "torch_npu" or not _runs_its_file(function):
        return package == "torch_npu"
    if wrapped is not None and (
        function.__globals__["__name__"] not in _OWN_WRAPPERS or not _is_of_torch(wrapped, name, space)
    ):
        return False
    if function.__code__.co_qualname == _OWN_CLOSURES.get(function.__globals__["__name__"]):
        return all(map(_is_known_by_its_name, function.__closure__ or ()))
    *classes, own_name = function.__qualname__.split(".")
    if own_name not in (name, _ALIASES.get(name)):
        return False
    if not isinstance(space, type) or not classes or function.__name__ != own_name:
        return True
    return any(base.__qualname__ == ".".join(classes) for base in space.__mro__)


def _is_known_by_its_name(cell: types.CellType) -> bool:
    """Whether what a closure holds, if it can be called, is torch's function of that name."""
    value = cell.cell_contents
    return not callable(value) or _is_of_torch(value, getattr(value, "__name__", ""), None)
