"""Weights of bound models that lie in FRACTAL_NZ on an NPU: which are cast, when, and back again.

Those of ``nn.Linear`` layers that nothing reads but our ops. Parameters stay the objects they were; their
memory is exchanged, when a model is bound, moved (``to``, ``half``, ``npu``) or frozen (``requires_grad_``).
Before a module's methods write into such a weight or make another of it, it is cast back.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import native_npu
from ..config import Settings
from ..engine import source, swap
from ..engine.undo_stack import UndoStack
from ..replacements import npu_format
from ..replacements.npu_format import FRACTAL_NZ, ND

_MODULE = "torch.nn.modules.module"
#: How torch_npu pickles the format.
_PICKLED_NZ = "npu_format_/FRACTAL_NZ"
#: Methods that read weights before a model is used.
_EARLY = ("_init_weights", "init_weights", "_tie_weights", "tie_weights")


class Weights:
    """The weights in FRACTAL_NZ of this process. One instance, `weights`, serves it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._hooks = UndoStack()
        #: Layers whose weight we have cast, with the bytes that padding adds.
        self._cast: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._settings: weakref.WeakKeyDictionary[torch.nn.Module, Settings] = weakref.WeakKeyDictionary()
        #: Why weights were left, with how many, by model.
        self._left: weakref.WeakKeyDictionary[torch.nn.Module, Counter[str]] = weakref.WeakKeyDictionary()

    def bind(self, model: torch.nn.Module, settings: Settings) -> None:
        """Bring the weights of a bound model to the format they should have now."""
        if not (library := native_npu.status()) or not library.loaded:
            return
        with self._lock:
            unwanted = _unwanted(settings)
            if unwanted and not self._settings:
                self._left[model] = Counter({unwanted: _count(model)})
                return
            self._settings[model] = settings
            self._hook()
            reasons = {layer: unwanted or reason for layer, reason in _reasons(model).items()}
            for layer in self._layers(model):
                if reasons.get(layer, "no call of ours"):
                    self._cast_back(layer)
            for layer, reason in reasons.items():
                if not reason and layer not in self._cast:
                    reasons[layer] = self._cast_one(layer)
            self._left[model] = Counter(filter(None, reasons.values()))

    def unbind(self, model: torch.nn.Module) -> None:
        """Cast the weights of ``model`` back, and leave it alone."""
        with self._lock:
            for part in model.modules():
                self._settings.pop(part, None)
                self._left.pop(part, None)
            for layer in self._layers(model):
                self._cast_back(layer)
            if not self._settings:
                self._hooks.undo_all()

    def unbind_all(self) -> None:
        """Cast every weight back, also where the model is gone."""
        with self._lock:
            for layer in list(self._cast):
                self._cast_back(layer)
            self._settings.clear()
            self._left.clear()
            self._hooks.undo_all()

    def to_dict(self) -> dict[str, Any]:
        """How many weights lie in FRACTAL_NZ, the bytes that padding adds, and why others do not."""
        with self._lock:
            left = sum(self._left.values(), Counter())
            return {"weights": len(self._cast), "padding": sum(self._cast.values()), "left": dict(left)}

    def lines(self) -> list[str]:
        """`to_dict` in words, for the status; none where no model was considered."""
        found = self.to_dict()
        if not found["weights"] and not found["left"]:
            return []
        lines = [f"  FRACTAL_NZ: {found['weights']} weights, padding adds {found['padding']} bytes"]
        return lines + [f"  FRACTAL_NZ: {n} weights in ND: {why}" for why, n in found["left"].items()]

    def _layers(self, module: torch.nn.Module) -> list[torch.nn.Module]:
        return [part for part in module.modules() if part in self._cast] if self._cast else []

    def _cast_one(self, layer: torch.nn.Module) -> str:
        weight = layer._parameters["weight"]
        was_nz = npu_format.format_of(weight) == FRACTAL_NZ
        if was_nz and npu_format.internal.are_the_users:
            return "cast by the user"
        npu_format.internal.allow()
        if not was_nz:  # else a copy of a model that was cast
            weight.data = npu_format.cast(weight.data, FRACTAL_NZ)
        if npu_format.format_of(weight) != FRACTAL_NZ:
            return "torch_npu did not cast it"
        self._cast[layer] = npu_format.padding_of(weight)
        return ""

    def _cast_back(self, layer: torch.nn.Module) -> None:
        del self._cast[layer]
        weight = layer._parameters.get("weight")
        if weight is not None and weight.device.type == "npu" and npu_format.format_of(weight) == FRACTAL_NZ:
            weight.data = npu_format.cast(weight.data, ND)

    def _hook(self) -> None:
        if not len(self._hooks):
            self._hooks.set_attribute(_MODULE, "Module._apply", self._wrap_apply)
            self._hooks.set_attribute(_MODULE, "Module.requires_grad_", self._wrap_requires_grad)
            self._hooks.set_attribute(_MODULE, "Module._load_from_state_dict", self._wrap_load)
            self._hooks.set_attribute("torch._utils", "get_tensor_metadata", _wrap_metadata)

    def _consider_again(self, module: torch.nn.Module) -> None:
        parts = set(module.modules())
        for model, settings in list(self._settings.items()):
            if not parts.isdisjoint(model.modules()):
                self.bind(model, settings)

    def _wrap_apply(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _apply(module: torch.nn.Module, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if isinstance(fn, _OnNd):  # a child: torch calls this for each
                return original(module, fn, *args, **kwargs)
            ours = {id(layer._parameters.get("weight")) for layer in self._layers(module)}
            result = original(module, _OnNd(fn, ours), *args, **kwargs)
            self._consider_again(module)
            return result

        return _apply

    def _wrap_requires_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def requires_grad_(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = original(module, *args, **kwargs)
            self._consider_again(module)
            return result

        return requires_grad_

    def _wrap_load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # copy_ into FRACTAL_NZ writes nothing where torch_npu 2.13 finds aclnnNpuFormatCast (CANN 9.1).
        @functools.wraps(original)
        def _load_from_state_dict(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module not in self._cast:
                return original(module, *args, **kwargs)
            with self._lock:
                self._cast_back(module)
                try:
                    return original(module, *args, **kwargs)
                finally:
                    if not npu_format.layer_unfit(module):
                        self._cast_one(module)

        return _load_from_state_dict


class _OnNd:
    """What ``Module._apply`` maps over tensors; of those in FRACTAL_NZ it makes others from ND."""

    def __init__(self, function: Callable[..., Any], ours: set[int]) -> None:
        self.function, self.ours = function, ours

    def __call__(self, tensor: torch.Tensor) -> Any:
        if id(tensor) in self.ours and self._makes_another(tensor):
            tensor = npu_format.cast(tensor.detach(), ND)
        return self.function(tensor)

    def _makes_another(self, tensor: torch.Tensor) -> bool:
        # `to` and `half` give back what is there and of that dtype already.
        probe = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        try:
            return self.function(probe) is not probe
        except Exception:  # noqa: BLE001 - asked of the tensor itself next, which raises to the caller
            return True


def _wrap_metadata(original: Callable[..., Any]) -> Callable[..., Any]:
    # torch_npu pickles the format, and casts to it what is loaded; what lies in the file is in ND.
    @functools.wraps(original)
    def get_tensor_metadata(tensor: torch.Tensor) -> Any:
        metadata = original(tensor)
        if not metadata or _PICKLED_NZ not in metadata or npu_format.internal.are_the_users:
            return metadata
        return original(npu_format.cast(tensor.detach(), ND))

    return get_tensor_metadata


def _unwanted(settings: Settings) -> str:
    if settings.nz == "0":
        return "LITEBOOST_NZ=0"
    is_310p = torch.ops.liteboost._npu_soc().startswith("Ascend310P")
    return "" if settings.nz == "1" or is_310p else "no gain is known on this SoC; LITEBOOST_NZ=1 casts"


def _served(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """(name, layer) of every layer whose call in its parent is ours."""
    for parent in model.modules():
        mark = swap.mark_of(parent)
        for name in sorted(mark.calls) if mark is not None else ():
            layer = parent._modules.get(name)
            if layer is not None:
                yield name, layer


def _count(model: torch.nn.Module) -> int:
    return len({layer for _, layer in _served(model)})


def _reasons(model: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """Every layer of ``model`` that our ops serve, with the reason why its weight stays in ND, or ``""``."""
    owners = Counter(
        _memory(tensor)
        for module in model.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None and tensor.device.type == "npu" and tensor.numel()
    )
    read = _weights_read({swap.original_class(module).__module__ for module in model.modules()})
    holders = Counter(child for module in model.modules() for child in module._modules.values())
    found: dict[torch.nn.Module, str] = {}
    for name, layer in _served(model):
        reason = npu_format.layer_unfit(layer)
        if not reason and (holders[layer] > 1 or owners[_memory(layer._parameters["weight"])] > 1):
            reason = "shared with another module"
        if not reason and name == "base_layer":
            reason = "an adapter wraps it"
        if not reason and name in read:
            reason = "the model reads the weight itself"
        found[layer] = reason
    return found


def _memory(tensor: torch.Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def _weights_read(modules: set[str]) -> set[str]:
    """Names of children whose weight is read where models of these Python modules compute."""
    return set().union(*(_read_in(name) for name in modules if name.split(".")[0] != "torch"))


@functools.cache
def _read_in(module: str) -> frozenset[str]:
    """X of every ``X.weight`` and ``self.X.weight`` in a file, but where weights are made and tied."""
    try:
        tree = source.tree_of(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError, SyntaxError):
        return frozenset()
    pending: list[ast.AST] = [tree]
    found = set()
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef) and node.name in _EARLY:
            continue
        if isinstance(node, ast.Attribute) and node.attr == "weight":
            owner = node.value
            found.add(getattr(owner, "attr", None) or getattr(owner, "id", ""))
        pending += ast.iter_child_nodes(node)
    return frozenset(found)


weights = Weights()
# Held through a fork: one that another thread holds at that moment would never be released in the child.
os.register_at_fork(
    before=weights._lock.acquire,
    after_in_parent=weights._lock.release,
    after_in_child=weights._lock.release,
)
