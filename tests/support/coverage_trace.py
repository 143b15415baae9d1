"""What a model really runs: calls of its functions and methods, and what they do in ATen.

Nothing here knows our rules. A run of the unpatched model says which of its parts are normalisations,
rotations, attention cores, gated products, linear layers and experts; a run of the served model says how
many of those calls are still the original's.
"""

from __future__ import annotations

import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from .calls import code_of

#: Functions that rotate queries or keys; a test of names, for what is inside has 43 forms.
ROTATION = re.compile(r"_?(apply_\w*(rotary|rope)\w*|rotate_\w+|vision_apply_rotary_emb)")
_NORMALISING = {"rsqrt", "native_layer_norm", "native_group_norm", "_fused_rms_norm"}
_MATMULS = {"mm", "bmm", "addmm", "baddbmm", "_grouped_mm"}
_ACTIVATIONS = {
    *("silu", "gelu", "relu", "sigmoid", "tanh", "mish", "elu", "leaky_relu", "softplus", "hardtanh"),
    *("hardswish", "hardsigmoid", "relu6", "celu", "selu", "erf", "log_sigmoid_forward"),
}
#: Operations whose result is still the same quantity: another shape, dtype, scale or bound.
_CARRYING = {
    *("view", "_unsafe_view", "transpose", "permute", "squeeze", "unsqueeze", "expand", "clone", "_to_copy"),
    *("detach", "alias", "t", "clamp", "clamp_min", "clamp_max", "pow"),
}


class Trace:
    """What happened in one run.

    Attributes:
        calls: Code object -> calls; by identity, for two files may hold equal code objects.
        methods: (code object's id, id of ``self``) -> calls of methods named ``forward``.
        rotations: Code object's id -> calls not made by another rotation.
        interfaces: Registry class name -> ids of the code objects it handed out.
        askers: Registry class name -> ids of the modules that asked it.
        products: id of the module whose own code it is -> gated products computed there by ATen.
        normalised: id of the module whose own code normalises -> times.
        matmuls: id of the module whose own code it is -> matrix products computed there by ATen.
    """

    def __init__(self) -> None:
        self.calls: Counter[int] = Counter()
        self.methods: Counter[tuple[int, int]] = Counter()
        self.rotations: Counter[int] = Counter()
        self.interfaces: dict[str, set[int]] = {}
        self.askers: dict[str, set[int]] = {}
        self.products: Counter[int] = Counter()
        self.normalised: Counter[int] = Counter()
        self.matmuls: Counter[int] = Counter()
        self.codes: dict[int, types.CodeType] = {}

    def _observe(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "return":
            if frame.f_code.co_name == "get_interface" and callable(argument):
                registry = type(frame.f_locals.get("self")).__name__
                code = code_of(argument)
                self.codes[id(code)] = code
                self.interfaces.setdefault(registry, set()).add(id(code))
                self.askers.setdefault(registry, set()).add(id(frame.f_back.f_locals.get("self")))
            return
        if event != "call":
            return
        code = frame.f_code
        name, key = code.co_name, id(code)
        self.calls[key] += 1
        self.codes[key] = code
        if name == "forward":
            self.methods[key, id(frame.f_locals.get("self"))] += 1
        elif ROTATION.fullmatch(name) and not _within_rotation(frame):
            self.rotations[key] += 1


def _within_rotation(frame: types.FrameType) -> bool:
    caller = frame.f_back
    for _ in range(3):
        if caller is None:
            return False
        if ROTATION.fullmatch(caller.f_code.co_name):
            return True
        caller = caller.f_back
    return False


def trace(action: Callable[[], Any]) -> Trace:
    """Run ``action`` and note what it does."""
    found = Trace()
    before = sys.getprofile()
    with _Operations(found), torch.no_grad():
        sys.setprofile(found._observe)
        try:
            action()
        finally:
            sys.setprofile(before)
    return found


@contextmanager
def modules_called() -> Iterator[dict[int, torch.nn.Module]]:
    """Modules called in the block, by id. Not for a served model: a hook makes ours step aside."""
    called: dict[int, torch.nn.Module] = {}

    def note(module: torch.nn.Module, _: Any) -> None:
        called[id(module)] = module

    handle = register_module_forward_pre_hook(note)
    try:
        yield called
    finally:
        handle.remove()


class _Operations(TorchDispatchMode):
    """Finds normalisations and gated products among ATen operations.

    A gated product is an activation's output times a tensor of the same shape that is not what the
    activation was computed from (``x * sigmoid(x)`` is an activation still).
    """

    sees_liteboost_ops = True

    def __init__(self, found: Trace) -> None:
        super().__init__()
        self.found = found
        # Tensors are kept, or another would get an id that was noted.
        self.kept: list[torch.Tensor] = []
        self.activated: dict[int, set[int]] = {}
        self.parents: dict[int, set[int]] = {}

    def __torch_dispatch__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten":
            self._aten(func.__name__.split(".")[0].removesuffix("_"), args, result)
        return result

    def _aten(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if name in _NORMALISING:
            self.found.normalised[id(_owner())] += 1
        elif name in _MATMULS:
            self.found.matmuls[id(_owner())] += 1
        tensors = [a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
        if not tensors:
            return
        if name in _ACTIVATIONS:
            self._mark(result, self._origins(tensors[0]))
        elif name == "mul" and len(tensors) == 2:
            self._product(tensors, result)
        elif name in _CARRYING or (name in ("mul", "add", "div", "sub", "rsub") and len(tensors) == 1):
            for part in result if isinstance(result, (tuple, list)) else [result]:
                if id(tensors[0]) in self.activated:
                    self._mark(part, self.activated[id(tensors[0])])
                self._descend(part, tensors[0])

    def _product(self, factors: list[torch.Tensor], result: torch.Tensor) -> None:
        for act, other in (factors, factors[::-1]):
            if id(act) not in self.activated:
                continue
            origins = self.activated[id(act)]
            if origins & self._origins(other) or _inside_activation():
                self._mark(result, origins | self._origins(other))
                return
            if act.shape == other.shape and id(other) not in self.activated:
                self.found.products[id(_owner())] += 1
                return
        for factor in factors:
            self._descend(result, factor)

    def _mark(self, tensor: torch.Tensor, origins: set[int]) -> None:
        self.kept.append(tensor)
        self.activated[id(tensor)] = set(origins)

    def _descend(self, tensor: Any, parent: torch.Tensor) -> None:
        if isinstance(tensor, torch.Tensor):
            self.kept += [tensor, parent]
            self.parents.setdefault(id(tensor), set()).update(self._origins(parent))

    def _origins(self, tensor: torch.Tensor) -> set[int]:
        """The tensor and what it was scaled, cut or converted from."""
        self.kept.append(tensor)
        return {id(tensor)} | self.parents.get(id(tensor), set())


def _owner() -> torch.nn.Module | None:
    """The module whose method runs: ``self`` of the innermost frame that has a module there."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            return owner
        frame = frame.f_back
    return None


def _inside_activation() -> bool:
    owner = _owner()
    return owner is not None and "activation" in type(owner).__module__
