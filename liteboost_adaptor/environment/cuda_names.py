"""``cuda`` in a script leads to the NPU where there is an NPU and no CUDA.

torch_npu's own ``transfer_to_npu`` cannot be undone, replaces every factory of torch and turns
``torch.jit.script`` off. This is less, and is taken back to the very objects that were there:

- Tensors made on ``cuda`` are made by kernels of the dispatcher (key ``CUDA``), of which a torch without CUDA
  has none. Two of them, ``empty`` and ``empty_strided``, are behind nearly every factory, in Python and in
  C++. Calls that name another device, or none, never meet them.
- A bare ``cuda`` is looked up in C++ before any kernel is asked, so the few functions that take one
  (`_METHODS`, `_FUNCTIONS`) translate it first.
- ``torch.cuda``'s functions are replaced by those of ``torch.npu`` of the same name.

``torch.cuda.is_available`` and ``device_count`` answer for the NPU only where a script asks. An installed
library that asks (transformers, accelerate, PEFT) knows NPUs by itself, or is about to choose a CUDA kernel.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

from ..engine.undo_stack import UndoStack

#: ``c10::DeviceType::CUDA``.
_CUDA = 1
#: Kernels of the dispatcher that make a tensor on the device they are asked for.
_KERNELS = ("empty.memory_format", "empty_strided", "tril_indices", "triu_indices")
#: (owner, name, position of the device among the positional arguments).
_METHODS = (("Tensor.to", 1), ("Tensor.new_tensor", None), ("Tensor.pin_memory", 1), ("Tensor.is_pinned", 1))
_FUNCTIONS = (("tensor", None), ("as_tensor", None), ("asarray", None))
_ELSEWHERE = (
    ("torch.utils._device", "DeviceContext.__init__", 1),  # `with torch.device(...)`, set_default_device
    ("torch.amp.autocast_mode", "autocast.__init__", 1),
    ("torch.amp.grad_scaler", "GradScaler.__init__", 1),
    ("torch.serialization", "default_restore_location", 1),  # torch.load, also of tensors saved on cuda
)
#: What the argument is called where it is given by name.
_KEYWORDS = ("device", "device_type", "location")
#: Functions and classes of torch.cuda that torch.npu has under the same name and with the same arguments.
_SAME = (
    *("current_device", "set_device", "get_device_name", "get_device_properties", "synchronize", "init"),
    *("manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed", "get_rng_state", "set_rng_state"),
    *("empty_cache", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
    *("reset_peak_memory_stats", "memory_stats", "memory_summary", "mem_get_info", "is_bf16_supported"),
    *("current_stream", "default_stream", "stream", "device", "Stream", "Event"),
)
#: Answered for the NPU where a script asks, and as before where a library does.
_ASKED = ("is_available", "device_count")


def translated(device: Any) -> Any:
    """``device`` with ``npu`` in place of ``cuda``; anything that does not name a cuda device as it is."""
    if type(device) is str:
        return "npu" + device[4:] if device == "cuda" or device.startswith("cuda:") else device
    if type(device) is torch.device and device.type == "cuda":
        return torch.device("npu") if device.index is None else torch.device("npu", device.index)
    return device


def install(stack: UndoStack) -> int:
    """Lead ``cuda`` to the NPU until ``stack`` is undone. Returns the number of names that were replaced."""
    before = len(stack)
    # Filled from torch's namespace when first asked, and to be filled with torch's own functions.
    _device_constructors()
    stack.add_kernels("aten", "CUDA", {name: _redirected(name) for name in _KERNELS})
    for path, position in _METHODS:
        stack.set_attribute("torch", path, functools.partial(_translating, position=position))
    for path, position in _FUNCTIONS:
        stack.set_attribute("torch", path, functools.partial(_translating, position=position))
        _keep_scriptable(stack, path)
    for module, path, position in _ELSEWHERE:
        stack.set_attribute(module, path, functools.partial(_translating, position=position))
    stack.set_attribute("torch", "Tensor.cuda", _to_npu)
    stack.set_attribute("torch", "Generator", _generator)
    stack.set_attribute("torch.cuda", "_lazy_init", lambda original: torch.npu.init)
    stack.add_undo(_forget_initialization)
    for name in _SAME:
        if hasattr(torch.npu, name):
            stack.set_attribute("torch.cuda", name, functools.partial(_same, getattr(torch.npu, name)))
    for name in _ASKED:
        stack.set_attribute("torch.cuda", name, functools.partial(_for_scripts, getattr(torch.npu, name)))
    return len(stack) - before


def _forget_initialization() -> None:
    """Have torch's C++ call ``torch.cuda._lazy_init`` again: it keeps that ours has returned.

    A torch that is linked with CUDA would go on without CUDA's state there, which ends the process.
    """
    # torch::utils::set_requires_device_init(c10::DeviceType, bool), of a library that this one is linked with
    function = getattr(
        ctypes.CDLL(torch._C.__file__), "_ZN5torch5utils24set_requires_device_initEN3c1010DeviceTypeEb", None
    )
    if function is not None:
        function(ctypes.c_int8(_CUDA), ctypes.c_bool(True))


def _redirected(name: str) -> Callable[..., torch.Tensor]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def kernel(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return op(*args, device=translated(device), **kwargs)

    return kernel


def _translating(original: Any, position: int | None) -> Any:
    """``original`` with its argument ``device``, also the positional one at ``position``, translated."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if position is not None and len(args) > position:
            wanted = args[position]
            named = translated(wanted)
            if named is not wanted:
                args = (*args[:position], named, *args[position + 1 :])
        if kwargs:
            for name in _KEYWORDS:
                if name in kwargs:
                    kwargs[name] = translated(kwargs[name])
        return original(*args, **kwargs)

    return function


def _keep_scriptable(stack: UndoStack, name: str) -> None:
    """Let ``torch.jit.script`` compile calls of our function as it compiled calls of torch's."""
    from torch.jit import _builtins

    ours = getattr(torch, name)
    operator = _builtins._find_builtin(ours.__wrapped__)
    if operator:
        stack.set_item(_builtins._get_builtin_table(), id(ours), operator, f"torch.jit's torch.{name}")


def _to_npu(original: Any) -> Any:
    @functools.wraps(original)
    def cuda(
        self: torch.Tensor,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> torch.Tensor:
        wanted = torch.device("npu", device) if isinstance(device, int) else translated(device or "npu")
        return self.to(wanted, non_blocking=non_blocking, memory_format=memory_format)

    return cuda


def _generator(original: type) -> type:
    class Meta(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, original)

    class Generator(original, metaclass=Meta):  # type: ignore[misc,valid-type]
        def __new__(cls, device: Any = "cpu") -> Any:
            return original(translated(device))

    Generator.__module__, Generator.__doc__ = original.__module__, original.__doc__
    Generator.__qualname__ = original.__qualname__
    return Generator


def _same(of_npu: Any, original: Any) -> Any:
    if isinstance(of_npu, type):
        return of_npu

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        named = {name: translated(value) for name, value in kwargs.items()}
        return of_npu(*map(translated, args), **named)

    return function


def _for_scripts(of_npu: Callable[[], Any], original: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(original)
    def function() -> Any:
        return of_npu() if _is_script(sys._getframe(1).f_code.co_filename) else original()

    return function


@functools.cache
def _is_script(file: str) -> bool:
    """Whether ``file`` belongs to neither an installed package nor Python itself."""
    path = os.path.abspath(file)
    if {"site-packages", "dist-packages"} & set(path.split(os.sep)):
        return False
    places = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    return not any(path.startswith(place + os.sep) for place in places)
