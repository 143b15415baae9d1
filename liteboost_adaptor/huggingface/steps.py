"""Where we meet a model's forward as a whole: steps of a few tokens are recorded and run as programs."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad

from ..config import Settings
from ..kv_cache import buffers
from ..program import casts
from ..program.arguments import cache_name, is_decode_step, tokens
from ..program.graph import RULE, TITLE
from ..program.owner import STEPS
from ..program.step import Steps, forget_all
from ..report import DISABLED, IDLE, CallCounter, Listed, report
from . import paged_updates, ragged


def generates(cls: type) -> bool:
    """Whether models of ``cls`` are called for one token after the other."""
    can_generate = getattr(cls, "can_generate", None)
    return callable(can_generate) and hasattr(cls, "generate") and bool(can_generate())


def forward(original: Callable[..., Any], counter: CallCounter) -> Callable[..., Any]:
    """A forward of a model that runs a recorded step where one is right, and else ``original``."""

    names, parameters = _positional(original), frozenset(inspect.signature(original).parameters)

    in_pages = paged_updates.finishing(original)

    @functools.wraps(original)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a graph is no call: see `CallCounter`
            return original(self, *args, **kwargs)
        named = kwargs
        if args:
            if len(args) > len(names) or any(name in kwargs for name in names[: len(args)]):
                return original(self, *args, **kwargs)  # which says what is wrong
            named = {**dict(zip(names, args, strict=False)), **kwargs}
        is_ragged = ragged.is_ragged(named)
        if not is_ragged and (not cache_name(named) or ragged.is_paged(named)):
            return original(self, *args, **kwargs)
        if observer := _observer() or casts.fault(tokens(named)):
            if is_ragged or is_decode_step(named):
                counter.count_fallback(observer)
            return (in_pages if is_ragged else original)(self, *args, **kwargs)
        steps = vars(self).get(STEPS)
        if steps is None or steps.model() is not self:  # somebody has copied the attributes of a model
            steps = vars(self)[STEPS] = Steps(self, counter, parameters, *_settings(self))
        call = functools.partial(in_pages if is_ragged else original, self)
        if not is_ragged:
            return steps.serve(self, call, named)
        step = ragged.step_of(call, named)
        if isinstance(step, str):
            if step:
                counter.count_fallback(step)
            return call(**named)
        return steps.serve_step(self, step)

    return forward


@contextlib.contextmanager
def served_by(model: torch.nn.Module, steps: Any) -> Iterator[None]:
    """In the block, ``steps`` serves ``model``'s calls with a cache, in place of `program.step.Steps`."""
    own = vars(model)
    former = own.get(STEPS)
    own[STEPS] = steps
    try:
        yield
    finally:
        if former is None:
            del own[STEPS]
        else:
            own[STEPS] = former  # where it was: the order of attributes is compared


def _positional(function: Callable[..., Any]) -> list[str]:
    """Names of the parameters behind ``self`` that may be given by position."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return [each.name for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]


def _settings(model: torch.nn.Module) -> tuple[bool, str]:
    """Whether a difference is an error, and whether steps are captured."""
    from .runtime import runtime  # which binds models to this

    settings = runtime.settings_of(model)
    if settings is None:
        return False, "0"
    return settings.strict, "0" if _not_captured(settings) else settings.graph


def _not_captured(settings: Settings) -> str:
    """What of ``settings`` turns capturing off, or an empty string."""
    for glob in settings.disable:
        if fnmatch.fnmatchcase(RULE, glob):
            return f"turned off by LITEBOOST_DISABLE={glob}"
    return "turned off by LITEBOOST_GRAPH=0" if settings.graph == "0" else ""


def without_programs(original: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.utils.swap_tensors``, which exchanges only what nobody but Python holds: programs let go."""

    @functools.wraps(original)
    def swap_tensors(*args: Any, **kwargs: Any) -> Any:
        forget_all()
        return original(*args, **kwargs)

    return swap_tensors


def _observer() -> str:
    """What sees or changes operators as Python calls them, or wants their gradients, or an empty string."""
    if torch.is_grad_enabled():
        return "gradients may be wanted: no torch.no_grad() or inference_mode() around it"
    if torch._C._len_torch_dispatch_stack() > 0:
        return "a dispatch mode is active"
    if torch._C._len_torch_function_stack() > 0:
        return "a function mode is active"
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "a transform of torch.func or forward-mode AD is active"
    if torch.jit.is_tracing():
        return "torch.jit traces"
    if buffers.is_recorded():
        return "a part of a step that is recorded"
    return ""


def unbind(model: torch.nn.Module) -> None:
    """Let go of the recorded steps of ``model`` and its parts."""
    for module in model.modules():
        steps = vars(module).pop(STEPS, None)
        if steps is not None and steps.model() is module:
            steps.forget()


def rows(settings: Settings) -> Iterator[Listed]:
    """The row of captured steps, where one could have been captured."""
    if RULE in report.counters:
        reason = _not_captured(settings)
        yield Listed(RULE, TITLE, DISABLED if reason else IDLE, reason)
