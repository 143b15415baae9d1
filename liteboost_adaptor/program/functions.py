"""Which of torch's functions a recorded step may call, seen as Python, or C on its behalf, calls them.

Operators are noted below this, by the dispatcher. Here is seen what does not get there: functions that read
values where the dispatcher does not look, and those that make tensors of Python's numbers.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from . import trusted_code

if TYPE_CHECKING:
    from .record import Recorder

#: Attributes of tensors, and methods that are no operators: they tell what a tensor is, not what is in it.
_ABOUT = frozenset(
    {
        *(
            "shape",
            "dtype",
            "device",
            "layout",
            "ndim",
            "is_cpu",
            "is_cuda",
            "is_npu",
            "is_meta",
            "is_sparse",
        ),
        *("is_quantized", "is_nested", "is_mps", "is_xpu", "is_mkldnn", "is_sparse_csr", "requires_grad"),
        *("grad", "grad_fn", "is_leaf", "itemsize", "nbytes", "data", "T", "mT", "H", "mH", "real", "imag"),
        *("size", "stride", "dim", "numel", "nelement", "ndimension", "element_size", "storage_offset"),
        *(
            "is_contiguous",
            "is_floating_point",
            "is_complex",
            "is_signed",
            "is_conj",
            "is_neg",
            "is_inference",
        ),
        *(
            "type",
            "get_device",
            "__len__",
            "__iter__",
            "__hash__",
            "names",
            "_base",
            "is_shared",
            "is_pinned",
        ),
        *("__dir__", "new_empty", "new", "is_tensor", "is_same_size", "has_names", "result_type"),
        *("dim_order", "_version", "output_nr", "retains_grad", "name", "_is_view", "_backward_hooks"),
    }
)
#: Of these, what others may change between two steps.
_CHANGING = frozenset(
    {
        *("requires_grad", "grad", "grad_fn", "is_leaf", "retains_grad", "_backward_hooks", "_version"),
        *("is_inference", "is_shared", "is_pinned", "name", "output_nr", "_base", "_is_view"),
        "storage_offset",
    }
)
#: How a tensor lies in memory, of which those that no operator takes tell Python alone.
_FORM = frozenset(
    {
        *("shape", "dtype", "device", "layout", "ndim", "size", "stride", "dim", "numel", "nelement"),
        *("ndimension", "element_size", "itemsize", "nbytes", "is_contiguous", "is_floating_point"),
        *("is_complex", "is_signed", "type", "__len__", "dim_order"),
    }
)
#: Operators that are made of others, and read values in C++ before the dispatcher is asked.
_READING = frozenset(
    {
        *("tensor_split", "hsplit", "vsplit", "dsplit", "ctc_loss", "histogramdd", "combinations", "item"),
        *(
            "_pack_padded_sequence",
            "_pad_packed_sequence",
            "pad_sequence",
            "_shape_as_tensor",
            "nonzero_numpy",
        ),
        *("set_data", "set_", "resize_", "_reshape_from_tensor", "choose_qparams_optimized", "istft"),
        *("nested_to_padded_tensor", "unflatten_dense_tensors", "_rowwise_prune", "gradient"),
    }
)
#: Those whose results are seen to be booleans (`record.Expected`), or refused there.
_ASKING = frozenset(
    {"__bool__", "is_nonzero", "__int__", "__float__", "__index__", "item", "equal", "allclose"}
)
#: Attributes that are set by operators.
_SET_BY_OPERATORS = frozenset({"real", "imag"})
#: Make tensors of Python's numbers, by `__getitem__` and `__setitem__` of lists of them.
_OF_NUMBERS = frozenset({"tensor", "as_tensor", "new_tensor", "asarray", "scalar_tensor"})
_INDEXING = frozenset({"__getitem__", "__setitem__"})
#: Move a tensor and cast it, in one.
_CASTING = frozenset({"to", "type_as"})
_PLAIN: tuple[type, ...] = (
    *(bool, int, float, complex, str, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


_COMPILED = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
)


class Functions(TorchFunctionMode):
    """Sees the functions that are called while ``recorder`` records.

    Attributes:
        fault: The first that no program can make, or an empty string.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self.fault = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        recorder = self._recorder
        if not _is_of_torch(func):
            # A function of torch hands on what stands under its name: who has put another there, which calls
            # the former, is called twice.
            recorder.is_tainted = True
            self.fault = self.fault or f"calls {name} in the place of a function of torch"
        frame = sys._getframe(1)
        caller = frame.f_globals.get("__name__") or ""
        if trusted_code.package(caller) != "liteboost_adaptor":  # what we read decides nothing
            self.fault = self.fault or _unknown(func, name)
        if getattr(func, "__name__", "") == "__set__":
            self._set(_attribute(func), args)
        if name in _CASTING:
            func, args, kwargs = _as_cast(func, name, args, kwargs)
        former = recorder.numbers_allowed
        if name in _OF_NUMBERS:
            recorder.numbers_allowed = _is_plain((args[1:] if name == "new_tensor" else args, kwargs))
            result = func(*args, **kwargs)
            if recorder.numbers_allowed and isinstance(result, torch.Tensor):
                recorder.slot_of(result)  # noted while it is known to be made of numbers
        else:
            # A tensor without dimensions is a number that an operator was given.
            recorder.numbers_allowed = (
                _is_plain_index(args[1]) if name in _INDEXING and len(args) > 1 else recorder.SCALARS
            )
            result = func(*args, **kwargs)
        recorder.numbers_allowed = former
        if name in _CHANGING and not trusted_code.is_known(frame.f_code, frame.f_globals):
            is_seen = bool(args) and recorder.tell(args[0], name, result)
            self.fault = self.fault or ("" if is_seen else f"asks for {name} of a tensor")
        elif name in _FORM and args and not trusted_code.is_known(frame.f_code, frame.f_globals):
            recorder.tell_form(args[0])
        return result

    def _set(self, name: str, args: Any) -> None:
        """``args[0].name = args[1]`` comes next, which the dispatcher sees of few attributes only."""
        if name in _SET_BY_OPERATORS:
            return
        self.fault = self.fault or f"sets {name} of a tensor"
        recorder = self._recorder
        recorder.written.keep(recorder.real(args[0]))
        if any(recorder.real(each) is not each for each in args if isinstance(each, torch.Tensor)):
            recorder.is_tainted = True  # what stands for a tensor got other values than the tensor


def _as_cast(func: Any, name: str, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """``x.to(device, dtype)`` as ``x.to(dtype)`` where ``x`` is on that NPU: the same values and strides.

    torch_npu 2.9.0 makes the first of new memory and of a copy into it, and asks for sizes by an operator.
    """
    x = args[0]
    if not isinstance(x, torch.Tensor) or x.device.type != "npu" or "copy" in kwargs:
        return func, args, kwargs
    try:
        # Of ``type_as``, too, whose argument `to` takes as well.
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args[1:], **kwargs)
    except (RuntimeError, TypeError):  # ``copy`` by position; a fault of the model's code is raised by `func`
        return func, args, kwargs
    if dtype is None or memory_format is not None or device != x.device:
        return func, args, kwargs
    return torch.Tensor.to, (x, dtype), {}


def _is_of_torch(func: Any) -> bool:
    if isinstance(func, types.FunctionType):
        return trusted_code.is_fixed(func.__globals__.get("__name__") or "")
    return isinstance(func, _COMPILED) or type(func).__module__.split(".")[0] == "torch"


def _name(func: Any) -> str:
    name = getattr(func, "__name__", "")
    return _attribute(func) if name in ("__get__", "__set__") else name


def _attribute(func: Any) -> str:
    """The attribute that ``func`` gets or sets."""
    return getattr(getattr(func, "__self__", None), "__name__", "")


def _unknown(func: Any, name: str) -> str:
    """Why no program can make a call of ``func``, or an empty string."""
    if isinstance(func, types.FunctionType):
        return ""  # what it calls is seen by itself (`watch`)
    if name in _READING and name not in _ASKING:
        return f"reads values ({name})"
    if name in _ABOUT or name in _ASKING or name in _OF_NUMBERS or name in _INDEXING:
        return ""
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return ""
    base = name.strip("_")
    # `__iadd__` and `__radd__` are `add`.
    for each in (name, base, *([base[1:]] if name.startswith(("__i", "__r")) else ())):
        if each in _ARITHMETIC or (each and _is_operator(each)):
            return ""
    return f"reads values (torch's {name})"


#: Python's names of operators that have another one in torch, and of conversions.
_ARITHMETIC = frozenset(
    {
        *("truediv", "floordiv", "matmul", "invert", "neg", "pos", "abs", "contains", "pow", "divmod", "mod"),
        *("or", "xor", "and", "float", "half", "bfloat16", "double", "int", "long", "bool", "byte", "short"),
        *("char", "cfloat", "cdouble", "chalf"),
    }
)


def _is_operator(name: str) -> bool:
    prefixes = ("", "linalg_", "special_", "fft_", "_")
    return any(hasattr(torch.ops.aten, f"{prefix}{name}") for prefix in prefixes)


def _is_plain(value: Any) -> bool:
    """Whether it consists of numbers and words of Python's."""
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value.values()))
    return type(value) in _PLAIN


def _is_plain_index(index: Any) -> bool:
    """Whether the lists in an index are plain."""
    parts = index if type(index) is tuple else (index,)
    return all(_is_plain(part) for part in parts if type(part) in (list, tuple))
