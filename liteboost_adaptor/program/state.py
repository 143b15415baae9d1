"""Guards: whether everything a recorded step could have read is still what it was."""

from __future__ import annotations

import abc
import ctypes
import functools
import itertools
import sys
import types
import warnings
import weakref
from collections import OrderedDict, deque
from typing import Any

import torch
from torch.nn.modules import module as nn_module

from .. import native, python_kernels
from . import trusted_code
from .bytecode import names_of
from .caches import parts
from .execution import Execution
from .objects import MISSING, attributes_of, cell_content, slot_content
from .owner import Owner
from .reachability import reached_by
from .reachable_state import PLAIN, Reached
from .tensors import attribute

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(
    name for name in vars(nn_module) if name.startswith("_global_") and name.endswith("_hooks")
)
#: Where transformers has its hooks by which a model's hidden states are captured.
_CAPTURING = "transformers.utils.output_capturing"
#: Attribute of a forward set on an instance, or of a hook, that may be recorded: it knows when it is
#: (`Recorder.require`), or does nothing but call operators.
RECORDABLE = "_liteboost_recordable"


class State:
    """What the functions of a step could have read, as it was when this was made.

    Attributes:
        fault: Something they may read whose state nobody can see, or an empty string.
        has_read: Whether any of them had to be read.
    """

    def __init__(self, model: torch.nn.Module, cache: Any, ran: Execution) -> None:
        hooks = [(getattr(nn_module, name), name) for name in _GLOBAL_HOOKS]
        classes = [type(cache), *map(type, parts(cache))]
        modules = [(module, f"model.{name}") for name, module in model.named_modules()]
        roots = [*modules, *((cls, cls.__qualname__) for cls in dict.fromkeys(classes)), *hooks]
        self._reached = reached = reached_by(ran, roots)
        self.fault = reached.fault
        dicts = [*reached.dicts, *reached.namespaces.values()]
        #: As they are, and as they were.
        self._dicts = dicts, [dict(dict.items(each)) for each in dicts]
        self._lists = reached.lists, [list(list.__iter__(each)) for each in reached.lists]
        names = [names_of(code) for code in ran.unread()]
        self.has_read = bool(names)
        self._process = _process()
        self._registered: object = None
        #: How many kernels were registered from Python.
        self._kernels: tuple[int, int] | None = None
        #: What Python was told of tensors: see `Recorder.tell`.
        self._told: list[tuple[torch.Tensor, str, Any]] = []
        # Operators ask for it in every run; a comparison on an NPU sets it for a while.
        self._determinism = _determinism()
        # What is made in inference mode is another kind of tensor.
        modes = ("is_inference", "is_inference_mode_enabled", "inference_mode")
        self._asks_for_mode = any(not used.all.isdisjoint(modes) for used in names)
        self._mode = torch.is_inference_mode_enabled()
        self._asks_for_ranks = any("is_initialized" in used.all for used in names)
        self._ranks = self._asks_for_ranks and _has_ranks()
        self._filters = _filters() if ran.warns else None
        self._reads_determinism = any("determinis" in name for used in names for name in used.all)
        classes_asked = ("isinstance", "issubclass")
        self._asks_for_classes = any(not used.globals.isdisjoint(classes_asked) for used in names)
        self._bases = [
            (cls, cls.__mro__)
            for cls in reached.namespaces
            if trusted_code.package(cls.__module__) not in trusted_code.OURS | trusted_code.LIBRARIES
        ]
        members = [set(set.__iter__(each)) for each in reached.sets]
        self._sets = [(a, b, frozenset(map(id, b))) for a, b in zip(reached.sets, members, strict=True)]
        # What was moved to an end is where it was in the dict below.
        self._orders = [
            (each, list(OrderedDict.__iter__(each)))
            for each in reached.dicts
            if isinstance(each, OrderedDict) and dict.__len__(each) > 1
        ]
        self._queues = [(each, list(deque.__iter__(each))) for each in reached.queues]
        self._spaces = [(space, frozenset(space)) for space in reached.spaces]
        self._types = list(map(type, reached.objects))
        self._attributes = list(map(attributes_of, reached.objects))
        named = {(id(space), name): (space, name, value) for space, name, value in reached.named}
        by_space = sorted(named.values(), key=lambda each: id(each[0]))
        self._named = [list(each) for each in zip(*by_space, strict=True)] or [[], [], []]
        functions = list({id(each): each for each in reached.functions}.values())
        self._functions = functions, [part for each in functions for part in _inside(each)]
        self._cells = (
            [cell for cell, _ in reached.cells],
            [cell if content is MISSING else content for cell, content in reached.cells],
        )
        self._remembered = None
        if (compiled := _compiled()) is not None:
            self._remembered = compiled.liteboost_note(
                *self._dicts,
                *self._cells,
                *self._functions,
                *self._named,
                MISSING,
                reached.objects,
                self._types,
            )
            weakref.finalize(self, compiled.liteboost_forget, self._remembered)
        self._owner = Owner(model)
        self._let_go_of(model)

    def _let_go_of(self, model: torch.nn.Module) -> None:
        """Hold ``model`` and the dict of its attributes no more: `Owner` compares them.

        The compiled kernels, which hold nothing, go on to compare them for as long as they are there.
        """
        dicts, objects = self._reached.dicts, self._reached.objects
        for at in [at for at, each in enumerate(dicts) if each is vars(model)]:
            del dicts[at], self._dicts[0][at], self._dicts[1][at]
        for at in [at for at, each in enumerate(objects) if each is model]:
            del objects[at], self._types[at], self._attributes[at]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those that existed."""
        return self._reached.tensors

    def is_as_it_was(self) -> bool:
        """Whether nothing of it was exchanged."""
        try:
            return self._has_settings() and self._holds_the_same() and not any(self._others())
        except Exception:  # noqa: BLE001 - what cannot be compared was exchanged
            return False

    def warns_as_before(self) -> bool:
        """Whether Python would do with a warning what it did, where the step gives one.

        No part of `is_as_it_was`: whoever catches warnings around a call changes that for a moment, for all.
        """
        return self._filters is None or self._filters == _filters()

    def freeze(self, told: list[tuple[torch.Tensor, str, Any]]) -> None:
        """From here on tensors have to be what Python was ``told`` of them, and no kernel may be registered.

        Nor a class with an abstract one, where code was read that may ask: libraries do so in any import.
        Not before: what a step that is recorded imports does both.
        """
        self._told, self._kernels = told, python_kernels.count()
        self._registered = abc.get_cache_token() if self._asks_for_classes else None

    def _has_settings(self) -> bool:
        is_registered = self._registered is not None and abc.get_cache_token() != self._registered
        if self._reads_determinism and _determinism() != self._determinism:
            return False
        if self._asks_for_mode and torch.is_inference_mode_enabled() != self._mode:
            return False
        if self._asks_for_ranks and _has_ranks() != self._ranks:
            return False
        if self._kernels not in (None, python_kernels.count()):
            return False
        return not is_registered and _process() == self._process

    def _holds_the_same(self) -> bool:
        """Dicts, lists, types and names: all at once, by identity, and by value where that fails."""
        reached = self._reached
        if not self._owner.is_there():
            return False
        if (compiled := _compiled()) is not None and compiled.liteboost_is_as_noted(
            self._remembered, *self._lists, reached.empty
        ):
            return True
        return next(self.changes(), None) is None

    def _others(self) -> Any:
        """For what there is little of: whether each was exchanged."""
        yield from (cls.__mro__ is not bases for cls, bases in self._bases)
        yield from (not _is_same_set(*each) for each in self._sets)
        yield from (not _are_same(list(deque.__iter__(each)), saved) for each, saved in self._queues)
        yield from (space.keys() != names for space, names in self._spaces)
        yield from (not is_same(_slot_of(each, name), value) for each, name, value in self._reached.slots)
        yield from (not is_same(attribute(each, name), value) for each, name, value in self._told)
        yield from (
            not is_same(getattr(each, name, None), value) for each, name, value in self._reached.described
        )
        yield from (list(OrderedDict.__iter__(each)) != order for each, order in self._orders)

    def changes(self) -> Any:
        """What was exchanged, each in words."""
        if not self._has_settings():
            yield "settings of torch, or the classes registered with an abstract one"
        yield from self._owner.changes(is_same)
        for live, saved in zip(*self._dicts, strict=True):
            now = dict(dict.items(live))  # some give another object at every look
            if len(now) != len(saved) or not all(map(_same_key, now, saved)):
                yield f"the attributes or keys {sorted(map(str, now.keys() ^ saved.keys()))[:4]}"
            else:
                yield from (f"{name}" for name, value in saved.items() if not is_same(now[name], value))
        for items, former in zip(*self._lists, strict=True):
            if not _are_same(items, former):
                yield "a list"
        if any(self._reached.empty):
            yield f"what was empty: {[str(each)[:40] for each in self._reached.empty if each][:2]}"
        things = zip(self._reached.objects, self._types, self._attributes, strict=True)
        for each, kind, own in things:
            if type(each) is not kind or attributes_of(each) is not own:
                yield f"the class or the dict of a {kind.__name__}"
        for space, name, value in zip(*self._named, strict=True):
            if not is_same(space.get(name, MISSING), value):
                yield f"the global {name}"
        for cell, content in self._reached.cells:
            if not is_same(cell_content(cell), content):
                yield "what a closure holds"
        parts = [part for each in self._functions[0] for part in _inside(each)]
        if any(now is not then for now, then in zip(parts, self._functions[1], strict=True)):
            yield "the code or the defaults of a function"
        if any(self._others()):
            yield "a slot, a set, a queue or the bases of a class"

    def give_back(self) -> None:
        """Make everything what it was, after a step that failed half way."""
        for cls, namespace in self._reached.namespaces.items():
            saved = self._dicts[1][self._index_of(namespace)]
            for name in {*namespace, *saved}:
                if namespace.get(name, MISSING) is not saved.get(name, MISSING):
                    setattr(cls, name, saved[name]) if name in saved else delattr(cls, name)
        self._owner.give_back()
        count = len(self._reached.dicts)
        for live, saved in itertools.islice(zip(*self._dicts, strict=True), count):
            now = dict(dict.items(live))
            if len(now) != len(saved) or any(
                now.get(key, MISSING) is not value for key, value in saved.items()
            ):
                dict.clear(live)
                for key, value in saved.items():
                    dict.__setitem__(live, key, value)
        for live in self._reached.empty:
            dict.clear(live)
        for items, former in [*zip(*self._lists, strict=True)]:
            if not _are_same(items, former):
                items[:] = former
        for members, before, ids in self._sets:
            if not _is_same_set(members, before, ids):
                members.clear()
                members.update(before)
        for queue, waiting in self._queues:
            if not _are_same(list(queue), waiting):
                queue.clear()
                queue.extend(waiting)
        for space, name, value in zip(*self._named, strict=True):
            if space.get(name, MISSING) is not value:
                space.pop(name) if value is MISSING else space.update({name: value})
        for cell, value in self._reached.cells:
            if cell_content(cell) is not value and value is not MISSING:
                cell.cell_contents = value
        for each, name, value in self._reached.slots:
            if _slot_of(each, name) is not value:
                delattr(each, name) if value is MISSING else setattr(each, name, value)

    def _index_of(self, namespace: dict[str, Any]) -> int:
        first = len(self._reached.dicts)
        return first + list(map(id, self._reached.namespaces.values())).index(id(namespace))


def _determinism() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _filters() -> tuple[Any, ...]:
    """By what Python shows a warning, keeps it in a list, or makes an error of it."""
    in_context = getattr(warnings, "_get_filters", None)  # from Python 3.14 on
    filters = warnings.filters if in_context is None else in_context()
    return list(filters), warnings.showwarning, getattr(warnings, "_showwarnmsg_impl", None)


def _has_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _process() -> tuple[Any, ...]:
    """Settings of the process that operators and Python may ask for."""
    return (
        torch.get_default_dtype(),
        torch._C._get_mkldnn_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        *_fp32_precisions(),
        torch.get_num_threads(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        _is_captured(),
        *[read() for read in _GETTERS],
    )


#: Backends and operators whose precision in fp32 torch keeps apart, from 2.9 on.
_PRECISIONS = (("generic", "all"), ("mkldnn", "all"), ("mkldnn", "matmul"), ("cuda", "matmul"))


def _fp32_precisions() -> list[Any]:
    read = getattr(torch._C, "_get_fp32_precision_getter", None)
    if read is None:
        return [torch._C._get_float32_matmul_precision(), torch._C._get_cublas_allow_tf32()]
    return [read(*each) for each in _PRECISIONS]


#: What code of the user's may ask of torch beside that, and operators of NPUs do.
_GETTERS = [
    getattr(torch._C, name)
    for name in (
        *("is_anomaly_enabled", "is_anomaly_check_nan_enabled", "is_autocast_cache_enabled"),
        *("_get_warnAlways", "_is_view_replay_enabled"),
        *("_get_cudnn_sdp_enabled", "_get_overrideable_sdp_enabled", "_get_cudnn_enabled"),
        *("_get_cudnn_benchmark", "_get_cudnn_deterministic", "_get_mkldnn_deterministic"),
        *(
            "_get_deterministic_fill_uninitialized_memory",
            "_get_nnpack_enabled",
            "_get_graph_executor_optimize",
        ),
    )
    if hasattr(torch._C, name)
]


def _inside(function: types.FunctionType) -> tuple[Any, ...]:
    return function.__code__, function.__defaults__, function.__kwdefaults__


def _slot_of(value: Any, name: str) -> Any:
    for cls in type(value).__mro__:
        slot = vars(cls).get(name)
        if isinstance(slot, types.MemberDescriptorType):
            return slot_content(slot, value)
    return MISSING


def _same_key(one: Any, other: Any) -> bool:
    return one is other or one == other


def is_same(one: Any, other: Any) -> bool:
    """Whether they are one object, or plain values that nothing tells apart."""
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is float:
        return one.hex() == other.hex()
    if kind is complex:
        return is_same((one.real, one.imag), (other.real, other.imag))
    if kind in (tuple, torch.Size):
        return _are_same(one, other)
    if isinstance(one, types.MethodType):
        return one.__func__ is other.__func__ and one.__self__ is other.__self__
    return kind in PLAIN and bool(one == other)


def _are_same(some: Any, others: Any) -> bool:
    return len(some) == len(others) and all(map(is_same, some, others))


def _is_same_set(one: set[Any], other: set[Any], ids: frozenset[int]) -> bool:
    """Whether ``one`` has the members of ``other``, of the same types; ``ids`` are those of ``other``'s."""
    if set.__len__(one) != len(other):
        return False
    if ids.issuperset(map(id, set.__iter__(one))):
        return True
    return {*map(_told_apart, set.__iter__(one))} == {*map(_told_apart, other)}


def _told_apart(member: Any) -> Any:
    """What two members of sets have in common that nothing tells apart."""
    kind = type(member)
    if kind is float:
        return kind, member.hex()
    if kind is complex:
        return kind, repr(member)
    return kind, member if kind in PLAIN else id(member)


@functools.cache
def _compiled() -> ctypes.PyDLL | None:
    """What the compiled kernels compare objects by (``kernels/program/unchanged.cpp``)."""
    status = native.status()
    if status is None or not status.loaded or status.path is None:
        return None
    library = ctypes.PyDLL(str(status.path))
    if not hasattr(library, "liteboost_note"):  # compiled before there was one
        return None
    library.liteboost_note.argtypes = [ctypes.py_object] * 12
    library.liteboost_note.restype = ctypes.c_void_p
    library.liteboost_forget.argtypes, library.liteboost_forget.restype = [ctypes.c_void_p], None
    library.liteboost_is_as_noted.argtypes = [ctypes.c_void_p, *[ctypes.py_object] * 3]
    library.liteboost_is_as_noted.restype = ctypes.c_int
    return library


def hooked(model: torch.nn.Module) -> bool:
    """Whether somebody watches or changes what a module of ``model`` is given or gives."""
    return any(getattr(nn_module, name) for name in _GLOBAL_HOOKS) or any(
        _has_forward_of_others(module) or any(_of_others(getattr(module, hooks)) for hooks in _HOOKS)
        for module in model.modules()
    )


def _of_others(hooks: dict[int, Any]) -> bool:
    return any(not (getattr(hook, RECORDABLE, False) or _captures(hook)) for hook in hooks.values())


def _captures(hook: Any) -> bool:
    """Whether ``hook`` is one of transformers' own: it does nothing where nobody collects hidden states."""
    return (
        type(hook) is types.FunctionType
        and hook.__module__ == _CAPTURING
        and trusted_code.is_known(hook.__code__, hook.__globals__)
    )


def _is_captured() -> bool:
    """Whether a forward around this one collects what its modules give."""
    collector = getattr(sys.modules.get(_CAPTURING), "_active_collector", None)
    return collector is not None and collector.get() is not None


def _has_forward_of_others(module: torch.nn.Module) -> bool:
    own = vars(module)
    return "forward" in own and not getattr(own["forward"], RECORDABLE, False)


__all__ = ["RECORDABLE", "Reached", "State", "hooked", "is_same"]
