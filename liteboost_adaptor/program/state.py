"""Everything Python could have decided by while a step was recorded, and whether it is still so."""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules import module as nn_module

from .. import native

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(
    name for name in vars(nn_module) if name.startswith("_global_") and name.endswith("_hooks")
)
#: Attribute of a forward set on an instance, or of a hook, that may be recorded: it knows when it is
#: (`Recorder.require`), or does nothing but call operators.
RECORDABLE = "_liteboost_recordable"
_MISSING = object()
#: Methods of tensors that read values without the dispatcher.
_READS = {"tolist", "numpy", "data_ptr", "__dlpack__", "__reduce_ex__", "untyped_storage"}
_PACKAGES = {"transformers", "accelerate", "peft", "safetensors", "einops", "numpy", "packaging"}
_RANDOM = ("random.", "_random.", "numpy.random.")
#: What notes and traces a step; what it calls is no part of the step.
_NOTING = (
    "importlib._bootstrap",
    "torch._subclasses",
    "torch.fx",
    "sympy",
    "mpmath",
    "liteboost_adaptor.program.record",
    "liteboost_adaptor.environment.npu_rotary",  # what it reads by is read before every run
)
#: Of a module's attributes, those its forward under ``no_grad`` asks nothing of.
_UNREAD = frozenset(vars(torch.nn.Module())) - {
    "training",
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
}


@dataclass
class Ran:
    """What Python did while a step was recorded.

    Attributes:
        names: Globals of the functions that ran, with the names these functions use.
        fault: A call that reads what no program can.
    """

    names: list[tuple[dict[str, Any], set[str]]] = field(default_factory=list)
    fault: str = ""

    def used(self) -> set[str]:
        """All names, of globals and of attributes."""
        return {name for _, names in self.names for name in names}


class State:
    """The attributes of a model's modules, their classes and configurations, and the globals of what ran."""

    def __init__(self, model: torch.nn.Module, ran: Ran) -> None:
        # Live ones beside copies, by kind.
        self._dicts: list[dict[Any, Any]] = []
        self._saved_dicts: list[dict[Any, Any]] = []
        self._lists: list[list[Any]] = []
        self._saved_lists: list[list[Any]] = []
        self._sets: list[set[Any]] = []
        self._saved_sets: list[set[Any]] = []
        self._empty: list[dict[Any, Any]] = []
        self._noted: set[int] = set()
        named = [(names, name, names.get(name, _MISSING)) for names, used in ran.names for name in used]
        self._named = [list(each) for each in zip(*named, strict=True)] or [[], [], []]
        for _, _, value in named:
            if not isinstance(value, types.ModuleType | types.FunctionType | type):
                self._note_value(value, 3)
        self._modules = modules = list(model.modules())
        self._types = list(map(type, modules))
        for module in modules:
            self._note(vars(module), 4, _UNREAD)
        used = ran.used() | {"__call__", "__getattr__", "__setattr__", "forward"}
        classes = dict.fromkeys(base for module in modules for base in type(module).__mro__[:-1])
        self._attributes = [
            (vars(cls), name, vars(cls).get(name, _MISSING)) for cls in classes for name in used
        ]
        self._attributes = [entry for entry in self._attributes if entry[2] is not _MISSING]
        self._sizes = [(vars(cls), len(vars(cls))) for cls in classes]
        for name in _GLOBAL_HOOKS:
            self._note(getattr(nn_module, name), 1)
        self._remembered = None
        if (compiled := _compiled()) is not None:
            self._remembered = compiled.liteboost_remember(self._dicts, self._saved_dicts)
            weakref.finalize(self, compiled.liteboost_forget, self._remembered)

    def _note(self, values: Any, depth: int, unread: frozenset[str] = frozenset()) -> None:
        if id(values) in self._noted:
            return
        self._noted.add(id(values))
        if isinstance(values, dict):
            if not values:
                self._empty.append(values)
                return
            self._dicts.append(values)
            self._saved_dicts.append(dict(values))
        elif isinstance(values, list):
            self._lists.append(values)
            self._saved_lists.append(list(values))
        else:
            self._sets.append(values)
            self._saved_sets.append(set(values))
        items = values.items() if isinstance(values, dict) else ((None, value) for value in values)
        for name, value in items:
            if name not in unread and not (type(name) is str and name.startswith("_liteboost_")):
                self._note_value(value, depth)

    def _note_value(self, value: Any, depth: int) -> None:
        if isinstance(value, dict | list | set):
            if depth:
                self._note(value, depth - 1)
        elif isinstance(value, tuple):
            for each in value:
                self._note_value(each, depth - 1 if depth else 0)
        elif depth and not isinstance(value, torch.nn.Module | torch.Tensor | type | types.ModuleType):
            if type(getattr(value, "__dict__", None)) is dict and type(value) is not types.FunctionType:
                self._note(vars(value), depth - 1)

    def is_as_it_was(self) -> bool:
        """Whether nothing of it was exchanged."""
        try:
            return (
                self._holds_the_same()
                and all([names.get(name, _MISSING) is value for names, name, value in self._attributes])
                and all([len(names) == size for names, size in self._sizes])
            )
        except Exception:  # noqa: BLE001 - what cannot be compared was exchanged
            return False

    def _holds_the_same(self) -> bool:
        if self._sets != self._saved_sets:
            return False
        if (compiled := _compiled()) is not None and compiled.liteboost_unchanged(
            self._remembered,
            self._lists,
            self._saved_lists,
            self._empty,
            self._modules,
            self._types,
            *self._named,
            _MISSING,
        ):
            return True
        # An object that is equal is as good; a number that was set again, for one.
        return (
            not any(self._empty)
            and self._dicts == self._saved_dicts
            and self._lists == self._saved_lists
            and list(map(type, self._modules)) == self._types
            and all([d.get(name, _MISSING) is value for d, name, value in zip(*self._named, strict=True)])
        )


@functools.cache
def _compiled() -> ctypes.PyDLL | None:
    """What the compiled kernels compare objects by (``kernels/program/unchanged.cpp``)."""
    status = native.status()
    if status is None or not status.loaded or status.path is None:
        return None
    library = ctypes.PyDLL(str(status.path))
    library.liteboost_remember.argtypes = [ctypes.py_object] * 2
    library.liteboost_remember.restype = ctypes.c_void_p
    library.liteboost_forget.argtypes, library.liteboost_forget.restype = [ctypes.c_void_p], None
    library.liteboost_unchanged.argtypes = [ctypes.c_void_p, *[ctypes.py_object] * 9]
    library.liteboost_unchanged.restype = ctypes.c_int
    return library


@dataclass
class Changes:
    """What a call did to a model's modules."""

    fault: str = ""


@contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[Changes]:
    """Notes a fault where the block exchanges an attribute of a module: a program would not."""
    before, changes = State(model, Ran()), Changes()
    yield changes
    if not before.is_as_it_was():
        changes.fault = "changes an attribute of the model"


def hooked(model: torch.nn.Module) -> bool:
    """Whether somebody watches or changes what a module of ``model`` is given or gives."""
    return any(getattr(nn_module, name) for name in _GLOBAL_HOOKS) or any(
        _has_forward_of_others(module) or any(_of_others(getattr(module, hooks)) for hooks in _HOOKS)
        for module in model.modules()
    )


def _of_others(hooks: dict[int, Any]) -> bool:
    return any(not getattr(hook, RECORDABLE, False) for hook in hooks.values())


def _has_forward_of_others(module: torch.nn.Module) -> bool:
    own = vars(module)
    return "forward" in own and not getattr(own["forward"], RECORDABLE, False)


@contextmanager
def watched(model: torch.nn.Module) -> Iterator[Ran]:
    """What Python does in the block: the globals of every function that runs, but for torch's and ours.

    A function that belongs neither to a model nor to the libraries models are written with is a fault: it may
    do what no operator does, such as count its calls.
    """
    packages = _PACKAGES | {
        _package(base.__module__) for part in model.modules() for base in type(part).__mro__
    }
    seen: set[types.CodeType] = set()
    found: dict[int, tuple[dict[str, Any], set[str]]] = {}
    ran = Ran()

    def note(frame: types.FrameType, event: str, called: Any) -> None:
        if event == "call":
            code = frame.f_code
            if code not in seen:
                seen.add(code)
                names = frame.f_globals
                package = _package(names.get("__name__", ""))
                if not _is_fixed(package) and not _is_noting(frame):
                    if package not in packages:
                        ran.fault = ran.fault or f"runs a function of {package}"
                    found.setdefault(id(names), (names, set()))[1].update(code.co_names)
        elif event == "c_call" and not ran.fault:
            ran.fault = _fault(called, frame)

    former, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # what is collected, and who is told of that, is not the model's doing
    sys.setprofile(note)
    try:
        yield ran
    finally:
        sys.setprofile(former)
        if collects:
            gc.enable()
        ran.names += found.values()


def _fault(called: Any, frame: types.FrameType) -> str:
    """Why a call of a function in C is none that a program can make, or an empty string."""
    owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
    if isinstance(owner, torch.Tensor) and name in _READS:
        return "" if _is_noting(frame) else f"reads values (Tensor.{name})"
    if f"{type(owner).__module__}.".startswith(_RANDOM):
        return "" if _is_noting(frame) else f"draws random numbers ({type(owner).__name__}.{name})"
    return ""


def _is_noting(frame: types.FrameType | None) -> bool:
    """Whether a call comes from what notes the step, or from an import."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_NOTING):
            return True
        if module == "liteboost_adaptor.program.step":
            return False
        frame = frame.f_back
    return False


def _package(module: str) -> str:
    return module.split(".")[0]


def _is_fixed(package: str) -> bool:
    return package in ("", "torch", "torch_npu", "liteboost_adaptor") or package in sys.stdlib_module_names
