"""What Python does while a step runs: which functions, and whether one of them does what no program can."""

from __future__ import annotations

import gc
import sys
import types
import warnings
from collections import Counter
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..report import CallCounter
from . import bytecode, trusted_code

#: Methods of tensors that read values without the dispatcher.
_READS = {"tolist", "numpy", "data_ptr", "__reduce_ex__", "untyped_storage", "const_data_ptr"}
_READS |= {"_to_dlpack", "_to_dlpack_versioned"}
#: By these torch computes where no mode sees it, to print a tensor for one.
_HIDES = {"_pop_torch_dispatch_stack", "_unset_dispatch_mode"}
#: What makes a text of a length: not the number's, while it is a symbol.
_TEXTS = {torch.SymInt.__repr__.__code__, torch.SymFloat.__repr__.__code__, torch.SymBool.__repr__.__code__}
#: Modules of torch's whose forward is one operator where no mode is on.
_FASTER = "torch.nn.modules."
_RANDOM = ("random.", "_random.", "numpy.random.")
#: What notes and traces a step; what it calls is no part of the step.
_NOTING = (
    "importlib._bootstrap",
    "torch._subclasses",
    "torch.fx",
    "sympy",
    "mpmath",
    "liteboost_adaptor.program.record",
    "liteboost_adaptor.program.tensors",
    "liteboost_adaptor.program.symbolic_forms",
    "liteboost_adaptor.program.symbolic_tensor",
    "liteboost_adaptor.program.operators",
    "liteboost_adaptor.program.disguise",
    "liteboost_adaptor.environment.npu_rotary",  # what it reads by is read before every run
)
#: Where the step that is watched was called.
_CALLER = "liteboost_adaptor.program.step"
_SERVED = CallCounter.count_served.__code__


class Unforeseen(BaseException):
    """A function is called that has to be read first: raised before it runs, caught where steps are recorded.

    What it does could not be taken back; no ``except Exception`` of the model's may catch this.
    """


@dataclass
class Execution:
    """What Python did in a step.

    Attributes:
        codes: What ran -> the globals it ran with.
        fault: A call that does what no program can, or an empty string.
        is_tainted: Whether symbols may have changed what ran.
        counts: How often each counter counted a call that it served.
        warns: Whether it gave a warning, which the filters of Python's may make an error or not show.
    """

    codes: dict[types.CodeType, dict[str, Any]] = field(default_factory=dict)
    fault: str = ""
    is_tainted: bool = False
    counts: Counter[CallCounter] = field(default_factory=Counter)
    warns: bool = False

    def unread(self) -> list[types.CodeType]:
        """Those that are not known, and have to be read."""
        return [code for code, names in self.codes.items() if not trusted_code.is_known(code, names)]


def is_possible() -> bool:
    """Whether Python can be watched: nobody else does, whom that would end or whose counts it would raise."""
    return sys.getprofile() is None and not torch._C._autograd._profiler_enabled()


@contextmanager
def observed(foreseen: Container[types.CodeType] | None = None) -> Iterator[Execution]:
    """What Python does in the block, but for what torch and we do between ourselves.

    Args:
        foreseen: What has been read and may run; anything, if ``None``.

    Raises:
        Unforeseen: Other code, that is not known, is called.
    """
    observer = _Observer(foreseen)
    collects = gc.isenabled()
    gc.disable()  # what is collected, and who is told of that, is not the model's doing
    sys.setprofile(observer.note)
    try:
        yield observer.ran
    finally:
        if observer.is_observing():
            sys.setprofile(None)
        else:  # not all of the step was seen
            observer.ran.fault = observer.ran.fault or "watches what Python does"
            observer.ran.is_tainted = True
        if collects:
            gc.enable()


@contextmanager
def unobserved() -> Iterator[None]:
    """Who watches need not see how an operator is noted, which takes most of a step."""
    watching = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(watching)


#: Who calls a function: what notes the step, or we; torch; code that is known; code that has to be read; and
#: what such code may not call.
_OURS, _FIXED, _KNOWN, _UNREAD, _STATEFUL = range(5)


class _Observer:
    def __init__(self, foreseen: Container[types.CodeType] | None) -> None:
        self.ran = Execution()
        self._foreseen = foreseen
        # By number: to hash code takes as long as to run it.
        self._kinds: dict[int, int] = {}
        self._alive: list[types.CodeType] = []

    def is_observing(self) -> bool:
        """Whether nobody else has begun to, and nobody has asked."""
        return sys.getprofile() == self.note

    def note(self, frame: types.FrameType, event: str, called: Any) -> None:
        if event == "return" or event == "c_return":  # half of all events: what returns was called before
            return
        code = frame.f_code
        if code is _SERVED:
            if event == "call":
                self.ran.counts[frame.f_locals["self"]] += 1
            return
        kind = self._kinds.get(id(code))
        if kind is None:
            if _is_noting(frame):
                return  # what it calls may be called by others, too
            kind = self._kinds[id(code)] = self._kind_of(frame)
            self._alive.append(code)
            if kind == _UNREAD and self._foreseen is not None and code not in self._foreseen:
                if not _handles_signal(frame):  # that is called once, whatever becomes of the step
                    raise Unforeseen
        elif kind == _STATEFUL and event == "call":
            self.ran.fault = self.ran.fault or _called(frame, frame.f_globals["__name__"])
        if event != "c_call" or not kind:
            return
        if called is warnings.warn:
            self.ran.warns = True
        if called is sys.getprofile:
            sys.setprofile(None)  # it is told what it would be told without us
            self.ran.fault = self.ran.fault or f"{_place(frame)} asks who watches"
        elif not self.ran.fault:
            self.ran.fault = _called_in_c(called, frame, kind)

    def _kind_of(self, frame: types.FrameType) -> int:
        """What code is, when it is first seen."""
        names = frame.f_globals
        module = names.get("__name__") or ""
        self.ran.codes[frame.f_code] = names
        if frame.f_code in _TEXTS:
            self.ran.is_tainted = True
            self.ran.fault = self.ran.fault or "makes a text of a length"
        self.ran.fault = self.ran.fault or _called(frame, module)
        if trusted_code.package(module) == "liteboost_adaptor":
            return _OURS
        if trusted_code.is_stateful(module, frame.f_code.co_name):
            return _STATEFUL
        if trusted_code.is_fixed(module) or trusted_code.is_standard(module):
            return _FIXED
        return _KNOWN if trusted_code.is_known(frame.f_code, names) else _UNREAD


def _called(frame: types.FrameType, module: str) -> str:
    """Why a function in Python is none that a program can stand for, as far as its module says."""
    if f"{module}.".startswith(_RANDOM):
        return f"draws random numbers ({module}.{frame.f_code.co_qualname})"
    if not trusted_code.is_stateful(module, frame.f_code.co_name):
        return ""
    caller = frame.f_back
    while caller is not None and trusted_code.is_standard(caller.f_globals.get("__name__") or ""):
        caller = caller.f_back
    if caller is None or trusted_code.is_known(caller.f_code, caller.f_globals):
        return ""
    return f"{_place(caller)} calls {module}.{frame.f_code.co_qualname}"


def _called_in_c(called: Any, frame: types.FrameType, kind: int) -> str:
    """Why a call of a function in C is none that a program can make, or an empty string."""
    name = called.__name__
    if name in _READS and not _is_noting(frame):
        owner = getattr(called, "__self__", None)
        if isinstance(owner, torch.Tensor) or name.startswith("_to_dlpack"):
            return f"reads values (Tensor.{name})"
    if name in _HIDES and not _is_noting(frame):
        return f"computes without being seen ({frame.f_code.co_qualname})"
    if name == "_has_torch_function" and (frame.f_globals.get("__name__") or "").startswith(_FASTER):
        return f"{_place(frame)} takes another way while a mode is on"
    if kind in (_FIXED, _STATEFUL):
        return ""
    owner = getattr(called, "__self__", None)
    if f"{type(owner).__module__}.".startswith(_RANDOM):
        return f"draws random numbers ({type(owner).__name__}.{name})"
    is_refused = (
        trusted_code.is_from_elsewhere(called)
        if kind == _KNOWN
        else not trusted_code.is_plain_function(called)
    )
    if not is_refused or _is_noting(frame):
        return ""
    where = owner.__name__ if isinstance(owner, types.ModuleType) else type(owner).__name__
    return f"{_place(frame)} calls {where}.{name}, which is in C and not known"


def faults_in(codes: list[types.CodeType]) -> str:
    """What functions that had to be read do that no guard can see, or an empty string."""
    return next((fault for code in codes if (fault := bytecode.fault_of(code))), "")


def _place(frame: types.FrameType) -> str:
    return f"{frame.f_code.co_qualname}, line {frame.f_lineno},"


def _handles_signal(frame: types.FrameType) -> bool:
    """Whether a call comes from no line of the step's: it is given the frame that was interrupted."""
    code, interrupted = frame.f_code, frame.f_back
    names = code.co_varnames[: code.co_argcount]
    return any(frame.f_locals.get(name) is interrupted for name in names) and interrupted is not None


def _is_noting(frame: types.FrameType | None) -> bool:
    """Whether a call comes from what notes the step, or from an import."""
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if module == _CALLER:
            return False
        if module.startswith(_NOTING):
            return True
        frame = frame.f_back
    return False
