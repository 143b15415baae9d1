"""When a call can be served by our ops; every check returns the reason against it, or an empty string."""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch.autograd import forward_ad
from torch.nn.modules import module as nn_module

from .config import settings

#: A module of somebody else's class: its attributes are what its author says, where torch's stub takes
#: each for a Tensor or a Module.
AnyModule = Any
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)
#: Kinds of device our ops serve; ``npu`` is added where there is one (`huggingface.runtime`).
DEVICES = {"cpu"}
#: Whether ``torch.export`` may record our ops. A constant: Dynamo does not read settings.
EXPORTS_OPS = settings().torch_export == "ops"


class _Options(TypedDict):
    device: str
    dtype: torch.dtype


#: Where and in what probe inputs are made, whatever torch's default device and dtype are.
PROBE: _Options = {"device": "cpu", "dtype": torch.float32}


def unserved(x: torch.Tensor, *others: torch.Tensor | None, casts: bool = False) -> str:
    """Why our ops do not serve a call with these tensors: grad mode, dtype, device, subclass, autocast.

    Args:
        casts: Whether the caller casts what autocast casts, or does nothing that it casts.

    In grad mode nothing is served, whether or not these tensors want gradients: a frozen model beside the
    same model with an adapter, or before it was frozen, would else differ by rounding. Neither is what
    ``torch.export`` records, unless asked for: it is taken where we are not (``LITEBOOST_TORCH_EXPORT``).

    Runs several hundred times a token: written for few attribute look-ups.
    """
    if type(x) not in _PLAIN_TYPES and not is_plain_type(type(x)):
        # First: of a proxy nothing else may be asked.
        return f"tensor subclass {type(x).__name__}"
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "a function transform (vmap, jvp)"
    if torch.jit.is_tracing():  # type: ignore[attr-defined] # torch.jit imports it without saying so
        return "torch.jit tracing"
    if torch.compiler.is_exporting() and not EXPORTS_OPS:
        return "torch.export"
    if torch.is_grad_enabled():
        return "grad mode"
    if x.dtype not in DTYPES:
        return f"dtype {str(x.dtype).removeprefix('torch.')}"
    if not x.is_cpu:
        kind = x.device.type
        if kind not in DEVICES:
            return f"device {kind}"
        if torch._C._is_any_autocast_enabled() and x.dtype in HALVES and not casts:
            if torch.is_autocast_enabled(kind):
                return "autocast"  # of a card computes norms and powers in fp32, and that is what they return
    if x.layout is not torch.strided:
        return "a sparse layout"
    for other in others:
        if other is None:
            continue
        if type(other) not in _PLAIN_TYPES and not is_plain_type(type(other)):
            return f"tensor subclass {type(other).__name__}"
        if not (other.is_cpu and x.is_cpu) and other.device != x.device:
            return "a weight on another device (offloaded)"
        if other.layout is not torch.strided:
            return "a sparse layout"
    return ""


_MODULE_CALL = torch.nn.Module.__call__
_SYMBOLIC = "liteboost_adaptor.program.symbolic_tensor"
#: Modules whose tensors stand for plain ones: the fakes torch traces with, and `program.symbolic_tensor`.
_STANDING_FOR = (
    "torch._subclasses.fake_tensor",
    "torch._subclasses.functional_tensor",
    _SYMBOLIC,
)
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def is_plain_type(kind: type) -> bool:
    """Whether tensors of this type hold ordinary memory: plain tensors, and the fakes torch traces with."""
    if kind in _PLAIN_TYPES:
        return True
    return kind.__module__ in _STANDING_FOR


def observed(module: torch.nn.Module) -> str:
    """Why a module's ``__call__`` cannot be bypassed: somebody hooked it or gave it a forward of its own."""
    if (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    ):
        return "a hook on the module"
    own = module.__dict__  # of which Dynamo knows no more than `in` before torch 2.12
    if "forward" in own or "_call_impl" in own or "_slow_forward" in own:
        return "the instance has a forward of its own"
    if type(module).__call__ is not _MODULE_CALL and not _is_noted_by_export(module):
        return "the class has a __call__ of its own"
    if nn_module._global_forward_hooks or nn_module._global_forward_pre_hooks:
        return "a global module hook"
    if nn_module._global_backward_hooks or nn_module._global_backward_pre_hooks:
        return "a global module hook"
    return ""


def _is_noted_by_export(module: torch.nn.Module) -> bool:
    """Whether only torch.export has exchanged ``__call__``, to note in which module an op was called."""
    return torch.compiler.is_exporting() and type(module).__call__ is torch.nn.Module.__call__


def class_as_written(module: torch.nn.Module) -> type[torch.nn.Module]:
    """The class its author wrote; that of a bound module is a subclass of ours."""
    cls = type(module)
    return cls.__bases__[0] if "__liteboost__" in vars(cls) else cls


def widens(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether what is computed of the two promotes ``other`` to fp32, which is exact."""
    return x.dtype == torch.float32 and other.dtype in HALVES


def autocast(x: torch.Tensor) -> str:
    """Why a product cannot be replaced: autocast would change its dtype."""
    return "autocast" if torch.is_autocast_enabled("cpu" if x.is_cpu else x.device.type) else ""


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype in which autocast has ``x`` multiplied, where our ops can take what `in_dtype` makes of it.

    None where it is off, and where torch traces, for what stands for a weight there would stay in autocast's
    cache.
    """
    if not torch._C._is_any_autocast_enabled() or not is_plain_type(type(x)):
        return None
    kind = "cpu" if x.is_cpu else x.device.type
    if kind not in DEVICES or not torch.is_autocast_enabled(kind):
        return None
    dtype = torch.get_autocast_dtype(kind)
    if dtype not in HALVES or torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return None
    return dtype if hasattr(torch.ops.liteboost, "_autocast_weight") else None


def is_castable(*tensors: torch.Tensor | None) -> bool:
    """Whether autocast would cast these, and `in_dtype` can."""
    return all(
        each is None
        or (
            (type(each) in _PLAIN_TYPES or type(each).__module__ == _SYMBOLIC)
            and each.dtype in DTYPES
            and (each.is_cpu or each.device.type in DEVICES)
        )
        for each in tensors
    )


def in_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor`` as autocast hands it to a product: of parameters the one cast that it keeps of each."""
    if tensor.dtype is dtype:
        return tensor
    if isinstance(tensor, torch.nn.Parameter):
        return torch.ops.liteboost._autocast_weight(tensor, dtype)
    return tensor.to(dtype)
