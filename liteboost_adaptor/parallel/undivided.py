"""A divided model becomes whole again: a process reads the rest of the checkpoint and works for itself.

What was done to the model since it was loaded stays: its modules, hooks and attributes are the same objects,
only what division has changed is changed back. A checkpoint cannot give back what was changed in memory, so a
model whose parts are not those of the checkpoint any more stays divided.
"""

from __future__ import annotations

import copy
import functools
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ParallelError
from ..huggingface.runtime import AROUND, PRIVATE, runtime
from ..quantization.names import PLAN
from ..quantization.weights import QuantizedWeight
from ..report import report
from . import alike, layers, memory, quantized
from .plan import Plan

#: Where a model keeps how it was loaded, and why it could not become whole.
_ORIGIN = f"{PRIVATE}origin"
_FAULT = f"{PRIVATE}apart_fault"
#: What a divided model has instead of its class's own.
_METHODS = ("save_pretrained", "train", "add_adapter", "load_adapter", "dequantize", "generate")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_HOOK_FLAGS = (
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
#: What is made while a model is divided, as long as it lives: caches by their `id`.
_caches: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_divided: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Origin:
    """How a model was loaded.

    Args:
        load: ``from_pretrained`` as a function of the class and what it was called with.
    """

    def __init__(
        self, load: Callable[..., Any], cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._load, self._cls = load, cls
        # Configurations may be changed after the call; what is large (a state_dict) is kept as it is.
        self._args, self._kwargs = args, {name: _kept(value) for name, value in kwargs.items()}

    def load(self) -> nn.Module:
        """The whole model once more. No random number of the caller's is drawn."""
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
            kwargs = {name: _kept(value) for name, value in self._kwargs.items()}
            found = self._load(self._cls, *self._args, **kwargs)
        return found[0] if isinstance(found, tuple) else found


def _kept(value: Any) -> Any:
    return copy.deepcopy(value) if hasattr(value, "to_dict") else value


def note_origin(model: nn.Module, origin: Origin | None, rank: int) -> None:
    """Keep how ``model`` was loaded, if it may become whole again, and which part this process holds."""
    _divided.add(model)
    if origin is not None:
        vars(model)[_ORIGIN] = (origin, rank)


def divided() -> list[nn.Module]:
    """The models of this process that were divided as they were loaded, and still are."""
    return [model for model in _divided if PLAN in vars(model)]


_CHANGED = "was changed since it was loaded, and what other processes hold of it is not known here"


def note_cache(cache: Any) -> None:
    """Keep in mind that ``cache`` holds what one rank of a divided model has computed."""
    if _caches.get(id(cache)) is not cache:
        try:
            _caches[id(cache)] = cache
        except TypeError:  # a tuple, whose tensors do not fit the whole model's and are refused there
            return


def is_possible(model: nn.Module) -> bool:
    """Whether ``model`` was divided by default, and how it was loaded is known."""
    return _ORIGIN in vars(model)


def restore(model: nn.Module, reason: str) -> None:
    """Make ``model`` whole on this rank.

    Args:
        reason: Why the ranks part.

    Raises:
        ParallelError: It cannot be; ``model`` stays as it is.
    """
    own = vars(model)
    if PLAN not in own:
        return
    fault = own.get(_FAULT) or _restored(model)
    if fault:
        own[_FAULT] = fault
        raise ParallelError(
            f"{reason}. This {type(model).__name__} is divided over the processes, and cannot go on "
            f"undivided: {fault}. Call it on every rank with the same, or start the script with "
            "LITEBOOST_TP=1."
        )
    sentence = (
        f"{reason}. So {type(model).__name__} was loaded whole by this process, which goes on by itself. "
        "With LITEBOOST_TP=1 each process has a model of its own from the start; with LITEBOOST_TP=N they "
        "share one, and this is an error."
    )
    report.note(sentence)
    warnings.warn(sentence, stacklevel=2)


def _restored(model: nn.Module) -> str:
    """Make ``model`` whole; why it cannot be, or an empty string."""
    own = vars(model)
    if _ORIGIN not in own:
        return "it was divided by shard(), or LITEBOOST_TP says that it is divided"
    plan: Plan = own[PLAN]
    origin, rank = own[_ORIGIN]
    reason = memory.why_not_held(model, plan)
    if reason:
        return reason
    try:
        twin = origin.load()
    except (MemoryError, RuntimeError, OSError, ValueError, TypeError) as fault:
        return (
            f"it could not be loaded once more ({type(fault).__name__}: {str(fault).partition(chr(10))[0]})"
        )
    was_bound = model in runtime.models()
    runtime.unbind(model)
    changed = _changed(model, twin, plan, rank)
    if not changed:
        _adopt(model, twin, plan)
    if was_bound:
        runtime.prepare(model)
    return changed


def _changed(model: nn.Module, twin: nn.Module, plan: Plan, rank: int) -> str:
    """Why ``twin`` is not what ``model`` has parts of, or an empty string. Gives ``twin`` its dtypes."""
    theirs = dict(twin.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in plan.cuts:
            continue
        whole = theirs.get(name)
        if whole is None:
            return f"the checkpoint gives it no {name} any more"
        whole.data = whole.data.to(parameter.device, parameter.dtype)
        if not _same(parameter.data, plan.cuts[name].held(whole.data, rank, plan.world_size)):
            return (
                f"{name} was changed since it was loaded, and other processes' parts of it are not known here"
            )
    for name, module in quantized.modules_of(model).items():
        cut = plan.cuts.get(quantized.parameter_of(name, module))
        if cut is None:
            continue
        there = twin.get_submodule(name)
        shares = quantized.Weight.of(there).shares(cut, plan.world_size)
        held = quantized.part_of(there.saved(), shares, rank).tensors()
        kept = module.saved().tensors()
        if any(not _same(kept[part], held[part].to(kept[part].device)) for part in kept):
            return (
                f"{name} was changed since it was loaded, and other processes' parts of it are not known here"
            )
    return ""


def _same(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    bits = (each.contiguous().flatten().view(torch.uint8) for each in (left, right))
    return torch.equal(*bits) if left.numel() else True


def _adopt(model: nn.Module, twin: nn.Module, plan: Plan) -> None:
    """Give ``model`` what ``twin``, which is whole, has where division has changed something."""
    for name in _touched(model, plan):
        here, there = model.get_submodule(name), twin.get_submodule(name)
        if isinstance(here, QuantizedWeight):
            _adopt_all(here, there)
        else:
            _adopt_parameters(here, there, name, plan)
            _adopt_attributes(here, there)
    for name, attributes in plan.attributes.items():
        here, there = vars(model.get_submodule(name)), vars(twin.get_submodule(name))
        for attribute in attributes:
            if attribute.startswith("config."):
                here["config"] = layers.whole_config(here["config"])
            else:
                here[attribute] = there[attribute]
    wanted = dict(twin.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in wanted and parameter.is_leaf:
            parameter.requires_grad_(wanted[name].requires_grad)
    own = vars(model)
    for name in (*_METHODS, PLAN, AROUND, _ORIGIN, alike.BEFORE, "_cache"):
        own.pop(name, None)
    for module in model.modules():
        _drop_hooks(module)
    if _caches:
        own[AROUND] = _refuse_caches


def _touched(model: nn.Module, plan: Plan) -> list[str]:
    """The modules that hold a part, or exchange."""
    modules = dict(model.named_modules(remove_duplicate=False))
    names = {*plan.roles, *plan.pairs, *plan.pairs.values()}
    for name in (*plan.cuts, *plan.once):
        names.add(name if name in modules else name.rpartition(".")[0])
    return sorted(names & set(modules))


def _adopt_all(here: nn.Module, there: nn.Module) -> None:
    hooks = {name: vars(here)[name] for name in (*_HOOKS, *_HOOK_FLAGS)}
    here.__class__ = there.__class__
    vars(here).clear()
    vars(here).update({**vars(there), **hooks})


def _adopt_parameters(here: nn.Module, there: nn.Module, name: str, plan: Plan) -> None:
    for local, parameter in there._parameters.items():
        full = f"{name}.{local}" if name else local
        if full in plan.cuts or full in plan.once:
            here._parameters[local] = parameter


def _adopt_attributes(here: nn.Module, there: nn.Module) -> None:
    here.__class__ = there.__class__
    for name in layers.OWN_ATTRIBUTES:
        if name in vars(there):
            vars(here)[name] = vars(there)[name]
        elif name in vars(here):
            del vars(here)[name]


def _drop_hooks(module: nn.Module) -> None:
    """Take the hooks away by which ``module`` exchanges, or compares what it is given."""
    for kind in _HOOKS:
        hooks = vars(module)[kind]
        for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
            del hooks[key]
            for flags in _HOOK_FLAGS:
                vars(module)[flags].pop(key, None)


def _is_ours(hook: Any) -> bool:
    return isinstance(hook, functools.partial) and (hook.func.__module__ or "").startswith(
        __package__ or "liteboost_adaptor"
    )


def _refuse_caches(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``call``, the forward of a model that was divided, which cannot go on in caches of that time.

    Raises:
        ParallelError: It is given one.
    """
    for value in _values(args, kwargs):
        if _caches.get(id(value)) is value:
            raise ParallelError(
                f"this {type(value).__name__} was filled while the model was divided, and holds the keys and "
                "values of one process's heads. The processes go their own ways now: begin with a new cache, "
                "or start the script with LITEBOOST_TP=1."
            )
    return call(*args, **kwargs)


def _values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    yield from args
    yield from kwargs.values()
