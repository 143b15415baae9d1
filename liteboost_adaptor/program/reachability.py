"""What Python code can reach: everything that functions which ran could have read, and where it is kept."""

from __future__ import annotations

import collections
import enum
import functools
import gc
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..watch import watched_places
from . import trusted_code
from .bytecode import names_of
from .execution import Execution
from .objects import (
    MISSING,
    NAMESPACES,
    attributes_of,
    cell_content,
    is_special,
    is_written_in_c,
    keeps_to_itself,
    namespace_of,
    shows_another_dict,
    slot_content,
)
from .reachable_state import PLAIN, Reached

#: More than this is not compared between two tokens.
MOST = 60_000
#: Of a module's attributes, those its forward under ``no_grad`` asks nothing of.
_UNREAD = frozenset(vars(torch.nn.Module())) - {
    "training",
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
}
_DESCRIPTIONS = (property, staticmethod, classmethod, functools.cached_property, functools.partialmethod)
#: Of functions and classes.
_NOTED = frozenset({"__name__", "__qualname__", "__doc__", "__module__", "__annotations__"})
#: By which a module answers for what it does not have.
_OF_MODULES = frozenset({"__getattr__", "__dir__"})
#: Modules of torch's operators, which are called by the dispatcher in any case.
_OPERATORS = ("torch._ops", "torch._library", "torch.library")


class _Walk:
    """Goes from object to object. ``strict``, beside each: whether code that had to be read may use it."""

    def __init__(self, ran: Execution) -> None:
        self.reached = Reached()
        self._codes = dict(ran.codes)
        unread = ran.unread()
        self._unread = set(unread)
        self._used = {name for code in self._codes for name in names_of(code).all}
        read = [names_of(code) for code in unread]
        self._strictly_used = {name for names in read for name in names.all}
        self._handed_on = {name for names in read for name in names.handed_on}
        #: Whether any attribute may be read, by a name that is computed.
        self._is_open = any(names.is_open for names in read)
        self._seen: set[tuple[int, bool]] = set()
        self._alive: list[Any] = []
        self._module_spaces: list[dict[str, Any]] = []
        self._strict_spaces: list[dict[str, Any]] = []
        self._waiting: list[tuple[Any, str, bool]] = []
        self._count = 0

    def go(self, roots: Iterable[tuple[Any, str]]) -> Reached:
        self._waiting += [(value, path, False) for value, path in roots]
        for code in self._codes:
            self._add_globals(code)
        # What the originals of our replacements would have called, in all models of the process.
        for place in watched_places():
            self.reached.named += [(space, name, space.get(name, MISSING)) for space, name in place.entries()]
            if isinstance(found := place.value(), types.FunctionType):
                self.reached.functions.append(found)
        # Whatever is done to a tensor is looked up there.
        self.reached.namespaces[torch.Tensor] = namespace_of(torch.Tensor)
        while self._waiting:
            value, path, strict = self._waiting.pop()
            self._visit(value, path, strict)
            if self._count > MOST:
                self._refuse(f"more is to be compared than {MOST} values, from {path} on")
                break
        self._check_all_were_reached()
        return self.reached

    def _check_all_were_reached(self) -> None:
        """What ran and had to be read is a function that was found, or made by one: its closure is compared.

        Others are held where nobody looks: by an operator, or by a registry of torch's.
        """
        found = {each.__code__ for each in self.reached.functions} if self._unread else set()
        made = {nested for code in found for nested in trusted_code.with_nested(code)}
        for code in self._codes:
            if code in self._unread and code not in made:
                self._refuse(f"runs {code.co_qualname}, to which nothing leads that is compared")

    def _refuse(self, fault: str) -> None:
        self.reached.fault = self.reached.fault or fault

    def _is_strict(self, name: Any, owner: type | None = None) -> bool:
        """Whether code that had to be read may ask for ``name``, of an object of class ``owner``."""
        if name in self._strictly_used:
            return True
        if owner is None:
            return self._is_open
        if trusted_code.is_fixed(owner.__module__) and not issubclass(owner, torch.nn.Module):
            return name in self._used  # by its own methods, which are not read
        # Names that it computes are not those of what libraries keep to themselves.
        is_of_library = trusted_code.package(owner.__module__) in trusted_code.LIBRARIES
        return self._is_open and not (is_of_library or keeps_to_itself(owner))

    def _is_used(self, name: Any) -> bool:
        return self._is_open or type(name) is not str or name in self._used

    def _visit(self, value: Any, path: str, strict: bool) -> None:
        kind = type(value)
        if kind in PLAIN or (id(value), strict) in self._seen:
            return
        is_first = (id(value), not strict) not in self._seen
        self._seen.add((id(value), strict))
        self._alive.append(value)
        handler = self._handler(value, kind)
        if handler is not None:
            if is_first or strict:
                handler(value, path, strict, is_first)
        elif strict and not isinstance(value, PLAIN):
            self._check_opaque(value, kind, path)

    def _handler(self, value: Any, kind: type) -> Callable[..., None] | None:
        for cls, handler in self._HANDLERS:
            if isinstance(value, cls):
                return functools.partial(handler, self)
        if is_written_in_c(kind):
            return None
        if trusted_code.is_harmless(kind.__module__):
            return self._visit_object
        if trusted_code.is_standard(kind.__module__) or (
            trusted_code.is_fixed(kind.__module__) and not _is_state(value)
        ):
            return self._visit_object_of_library
        return None if trusted_code.is_below(kind.__module__) else self._visit_object

    def _check_opaque(self, value: Any, kind: type, path: str) -> None:
        if isinstance(
            value, types.BuiltinFunctionType | types.MethodDescriptorType | types.ClassMethodDescriptorType
        ):
            # What is called from Python is seen as it is called (`watch`), and may never be. Not so what is
            # handed on, or kept where functions in C find it.
            name = path.rpartition(".")[2]
            is_only_called = name.isidentifier() and name not in self._handed_on
            if trusted_code.is_from_elsewhere(value) or not (
                is_only_called or trusted_code.is_plain_function(value)
            ):
                self._refuse(f"may call {path}, which is in C and not known")
            self._visit_owner(value, path)
        elif isinstance(value, types.MethodWrapperType):
            self._visit_owner(value, path)
        elif isinstance(value, _TRANSPARENT) or (
            trusted_code.is_fixed(kind.__module__) and not _is_state(value)
        ):
            return
        elif trusted_code.is_standard(kind.__module__) and not is_written_in_c(kind):
            return  # its methods are seen as they are called
        else:
            self._refuse(
                f"may use {path}, whose state cannot be seen ({kind.__module__}.{kind.__qualname__})"
            )

    def _visit_owner(self, method: Any, path: str) -> None:
        owner = getattr(method, "__self__", None)
        if not isinstance(owner, types.ModuleType):
            self._waiting.append((owner, f"{path} (__self__)", True))

    # What is reached from what.

    def _visit_tensor(self, value: torch.Tensor, path: str, strict: bool, is_first: bool) -> None:
        if not is_first:
            return
        self.reached.tensors.append(value)
        self.reached.objects.append(value)  # for its class, which may be exchanged
        if self._unread:
            self._add_dict(value.__dict__, path, self._is_used)

    def _visit_dict(self, value: dict[Any, Any], path: str, strict: bool, is_first: bool) -> None:
        if is_first:
            self._add_dict(value, path, None, strict)
            if isinstance(value, collections.defaultdict):
                self._compare_attributes(value, path, ("default_factory",), strict)
            if type(value) not in (dict, collections.OrderedDict):
                self._visit_parts(value, path, is_first)
        else:
            self._waiting += [(each, f"{path}[{key!r}]", True) for key, each in dict.items(value)]

    def _visit_items(self, value: Any, path: str, strict: bool, is_first: bool) -> None:
        base = next(each for each in _SEQUENCES if isinstance(value, each))
        if is_first:
            self._count += base.__len__(value)
            if isinstance(value, list):
                self.reached.lists.append(value)
            elif isinstance(value, set):
                self.reached.sets.append(value)
            elif isinstance(value, collections.deque):
                self.reached.queues.append(value)
            if type(value) not in _SEQUENCES:
                self._visit_parts(value, path, is_first)
        if self._count <= MOST:
            items = [each for each in base.__iter__(value) if type(each) not in PLAIN]
            self._waiting += [(each, f"an item of {path}", strict) for each in items]

    def _compare_attributes(self, value: Any, path: str, names: tuple[str, ...], strict: bool) -> None:
        """Attributes that are kept in C."""
        for name in names:
            each = getattr(value, name)
            self.reached.described.append((value, name, each))
            self._waiting.append((each, f"{path}.{name}", strict))

    def _visit_slice(self, value: slice, path: str, strict: bool, is_first: bool) -> None:
        self._compare_attributes(value, path, ("start", "stop", "step"), strict)

    def _visit_exception(self, value: BaseException, path: str, strict: bool, is_first: bool) -> None:
        self._compare_attributes(value, path, ("args",), strict)
        self._visit_parts(value, path, is_first)

    def _visit_proxy(self, value: Any, path: str, strict: bool, is_first: bool) -> None:
        self._waiting += [(each, path, strict) for each in gc.get_referents(value)]

    def _visit_nn_module(self, value: torch.nn.Module, path: str, strict: bool, is_first: bool) -> None:
        if not is_first:
            return
        if isinstance(value, torch.jit.ScriptModule):
            self._refuse(f"{path} is compiled by torch.jit")
        self.reached.objects.append(value)
        kind = type(value)
        self._add_dict(
            vars(value), path, lambda name: name not in _UNREAD and self._is_used(name), owner=kind
        )
        for name in ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"):
            self._waiting.append((vars(value).get(name), f"{path}.{name}", False))
        self._waiting.append((type(value), type(value).__qualname__, False))

    def _visit_class(self, value: type, path: str, strict: bool, is_first: bool) -> None:
        if strict and is_written_in_c(value) and not trusted_code.is_plain_class(value):
            self._refuse(f"may call {path}, a class that is in C and not known")
        if not is_first:
            return
        meta = type(value)
        if trusted_code.package(value.__module__) not in trusted_code.OURS | trusted_code.LIBRARIES:
            self._describe(value, path)
        if not trusted_code.is_fixed(meta.__module__) and not trusted_code.is_standard(meta.__module__):
            self._waiting.append((meta, f"type({path})", False))
        for cls in value.__mro__:
            if cls in self.reached.namespaces or is_written_in_c(cls) or cls.__module__ == "builtins":
                continue
            if trusted_code.is_standard(cls.__module__) or (
                trusted_code.is_below(cls.__module__) and not strict
            ):
                continue
            self.reached.namespaces[cls] = namespace = namespace_of(cls)
            self._count += len(namespace)
            is_ours = trusted_code.is_fixed(cls.__module__)
            self._check_special(cls, namespace)
            for name, each in list(namespace.items()):
                if type(name) is not str:
                    continue
                # A wrapper of somebody's own may hold what ran under another name.
                is_callable = isinstance(each, _CALLABLE) or (is_special(name) and _is_called_by_class(each))
                if self._is_used(name) or (is_callable and not _is_of_library(each)):
                    self._waiting.append(
                        (each, f"{cls.__qualname__}.{name}", not is_ours and self._is_strict(name, cls))
                    )

    def _check_special(self, cls: type, namespace: dict[str, Any]) -> None:
        """What Python itself calls by `__call__` and the like, is not seen where it is in C."""
        if trusted_code.package(cls.__module__) in trusted_code.OURS | trusted_code.LIBRARIES:
            return
        for name, each in namespace.items():
            is_called = isinstance(each, types.BuiltinFunctionType) and is_special(name)
            if is_called and not trusted_code.is_plain_function(each):
                self._refuse(f"may call {cls.__qualname__}.{name}, which is in C and not known")

    def _visit_python_module(self, value: types.ModuleType, path: str, strict: bool, is_first: bool) -> None:
        space, is_fixed = vars(value), trusted_code.is_fixed(value.__name__)
        if trusted_code.is_below(value.__name__) and not strict:
            return
        is_first = not any(space is each for each in self._module_spaces)
        if is_first:
            self._module_spaces.append(space)
        if strict and not any(space is each for each in self._strict_spaces):
            self._strict_spaces.append(space)
            self._visit_what_is_asked_for(value, space, path)
        for name in self._used if is_first else self._strictly_used:
            if name not in space:
                continue
            each, is_strict = space[name], strict and name in self._strictly_used
            if is_first:
                self.reached.named.append((space, name, each))
            if is_strict or not is_fixed or isinstance(each, types.ModuleType | type):
                self._waiting.append((each, f"{path}.{name}", is_strict))

    def _visit_what_is_asked_for(self, value: types.ModuleType, space: dict[str, Any], path: str) -> None:
        """Code that had to be read may ask a module for what it does not have, or by names it computes."""
        module = value.__name__
        is_library = trusted_code.is_fixed(module) or trusted_code.package(module) in trusted_code.LIBRARIES
        asked = {*_OF_MODULES, *self._strictly_used}
        self.reached.named += [(space, name, MISSING) for name in asked if name not in space]
        if is_library or trusted_code.is_below(module):
            if self._is_open:
                self.reached.named += [(space, name, each) for name, each in list(space.items())]
            return
        for name in space.keys() & _OF_MODULES:
            self.reached.named.append((space, name, space[name]))
            self._waiting.append((space[name], f"{path}.{name}", True))
        if type(value) is not types.ModuleType:
            self._visit_parts(value, path, True)
        if self._is_open or "hasattr" in self._strictly_used:
            self.reached.spaces.append(space)
        if self._is_open:
            self.reached.named += [(space, name, each) for name, each in list(space.items())]
            self._waiting += [(each, f"{path}.{name}", True) for name, each in list(space.items())]

    def _visit_function(self, value: types.FunctionType, path: str, strict: bool, is_first: bool) -> None:
        if trusted_code.package(value.__globals__.get("__name__") or "") == "liteboost_adaptor":
            return
        is_library = _is_of_library(value)
        if strict and not is_library:
            self._describe(value, path)
            self._add_dict(value.__dict__, path, None, True)
        if not is_first:
            return
        # One that did not run may hold one that did: a wrapper.
        if value.__code__ not in self._codes and not (value.__closure__ and value.__name__ in self._used):
            return
        is_unread = value.__code__ in self._unread
        self.reached.functions.append(value)
        if value.__dict__ or is_unread:
            self._add_dict(value.__dict__, path, None, is_unread)
        for each in (value.__defaults__, value.__kwdefaults__):
            self._waiting.append((each, f"a default of {path}", is_unread))
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            content = cell_content(cell)
            if not is_library:
                self.reached.cells.append((cell, content))
            self._waiting.append((content, f"{name} in {path}", is_unread))

    def _describe(self, value: Any, path: str) -> None:
        """What Python notes about a function or class of the user's, and its code may ask for."""
        for name in _NOTED & self._strictly_used:
            found = getattr(value, name, None)
            self.reached.described.append((value, name, found))
            self._waiting.append((found, f"{path}.{name}", False))

    def _visit_method(self, value: types.MethodType, path: str, strict: bool, is_first: bool) -> None:
        self._waiting += [(value.__func__, path, strict), (value.__self__, f"{path}.__self__", strict)]

    def _visit_description(self, value: Any, path: str, strict: bool, is_first: bool) -> None:
        names = ("fget", "fset", "__func__", "func", "args", "keywords", "__wrapped__")
        if isinstance(value, functools.partial):
            parts = [(value, name, getattr(value, name)) for name in ("func", "args", "keywords")]
            self.reached.described += parts
            if strict and value.func in (getattr, vars):
                self._refuse(f"may use {path}, which reads attributes by any name")
        self._waiting += [(getattr(value, name, None), f"{path} ({name})", strict) for name in names]

    def _visit_object(self, value: Any, path: str, strict: bool, is_first: bool) -> None:
        self._visit_parts(value, path, is_first)

    def _visit_object_of_library(self, value: Any, path: str, strict: bool, is_first: bool) -> None:
        """One of torch's or of Python's library: what it keeps, code that had to be read may ask for."""
        if strict and not type(value).__module__.startswith(_OPERATORS):
            self._visit_parts(value, path, True)

    def _visit_parts(self, value: Any, path: str, is_first: bool) -> None:
        """The attributes of an object, and its class."""
        if not is_first:
            return
        kind = type(value)
        if shows_another_dict(kind) and not trusted_code.is_below(kind.__module__):
            self._refuse(f"may use {path}, whose class shows another __dict__ than its attributes")
        self.reached.objects.append(value)
        self._waiting.append((kind, kind.__qualname__, False))
        own = attributes_of(value)
        if own is not None:
            # What a configuration is asked for is often computed.
            is_used: Callable[[Any], bool] | None
            is_used = (
                None if trusted_code.package(kind.__module__) in trusted_code.LIBRARIES else self._is_used
            )
            if keeps_to_itself(kind):
                is_used = self._used.__contains__
            self._add_dict(own, path, is_used, owner=kind)
        for cls in kind.__mro__:
            for name, slot in vars(cls).items():
                if isinstance(slot, types.MemberDescriptorType) and not is_written_in_c(cls):
                    each = slot_content(slot, value)
                    self.reached.slots.append((value, name, each))
                    self._waiting.append((each, f"{path}.{name}", self._is_strict(name, cls)))

    def _add_dict(
        self,
        own: dict[Any, Any],
        path: str,
        is_used: Callable[[Any], bool] | None,
        strict: bool | None = None,
        owner: type | None = None,
    ) -> None:
        """``own`` is compared; ``strict`` None: it holds attributes, whose names say who uses them."""
        if not dict.__len__(own):
            self.reached.empty.append(own)
            self._count += 1
            return
        self.reached.dicts.append(own)
        self._count += dict.__len__(own)
        if self._count > MOST:
            return
        for name, each in dict.items(own):
            if type(name) is str and name.startswith("_liteboost_"):
                continue
            if type(each) not in PLAIN and (is_used is None or is_used(name)):
                is_strict = self._is_strict(name, owner) if strict is None else strict
                self._waiting.append(
                    (each, f"{path}.{name}" if strict is None else f"{path}[{name!r}]", is_strict)
                )

    def _add_globals(self, code: types.CodeType) -> None:
        space, names = self._codes[code], names_of(code)
        module = space.get("__name__") or ""
        if trusted_code.package(module) == "liteboost_adaptor":
            return
        is_fixed, is_unread = trusted_code.is_fixed(module), code in self._unread
        for name in names.globals:
            value = space.get(name, MISSING)
            self.reached.named.append((space, name, value))
            if value is MISSING:
                builtin = _builtins(space)
                value = builtin.get(name, MISSING)
                self.reached.named.append((builtin, name, value))
            if value is not MISSING:
                # What torch keeps for itself is its own; who patches it patches a module.
                if not is_fixed or isinstance(value, types.ModuleType):
                    self._waiting.append((value, name, is_unread))

    _HANDLERS = (
        (torch.Tensor, _visit_tensor),
        (torch.nn.Module, _visit_nn_module),
        (type, _visit_class),
        (types.ModuleType, _visit_python_module),
        (types.FunctionType, _visit_function),
        (types.MethodType, _visit_method),
        (dict, _visit_dict),
        ((list, tuple, set, frozenset, collections.deque), _visit_items),
        (types.MappingProxyType, _visit_proxy),
        (slice, _visit_slice),
        (BaseException, _visit_exception),
        (NAMESPACES, _visit_object),
        ((*_DESCRIPTIONS, functools.partial), _visit_description),
    )


def reached_by(ran: Execution, roots: Iterable[tuple[Any, str]]) -> Reached:
    """What ``ran`` could have read, and what is reached from ``roots``, each with a name."""
    return _Walk(ran).go(roots)


def _is_of_library(function: Any) -> bool:
    """Whether a function is known: who exchanges one puts another in its place, and does not change it."""
    if not isinstance(function, types.FunctionType):
        return False
    return trusted_code.is_known(function.__code__, function.__globals__)


_SEQUENCES: tuple[Any, ...] = (list, tuple, set, frozenset, collections.deque)
_CALLABLE = (types.FunctionType, *_DESCRIPTIONS)
_TRANSPARENT = (
    *(types.WrapperDescriptorType, types.GetSetDescriptorType),
    *(types.MemberDescriptorType, enum.Enum),
)


def _is_called_by_class(value: Any) -> bool:
    """Whether an object that a class has under a special name is called, by a method in Python, for it."""
    return isinstance(vars(type(value)).get("__call__"), types.FunctionType)


def _is_state(value: Any) -> bool:
    """Whether an object of torch's holds something that changes."""
    return isinstance(value, torch.Generator) or hasattr(type(value), "__next__")


def _builtins(space: dict[str, Any]) -> dict[str, Any]:
    found = space.get("__builtins__", {})
    return vars(found) if isinstance(found, types.ModuleType) else found
