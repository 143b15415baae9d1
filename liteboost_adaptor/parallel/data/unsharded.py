"""Unshard a model: a process reads the rest of the checkpoint, and works independently from then on.

What was done to the model since it was loaded is kept: its modules, hooks and attributes are the same
objects, and only what sharding has changed is reverted. A checkpoint cannot restore what was changed in
memory, so a model whose shards differ from the checkpoint stays sharded.
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

from ...errors import ParallelError
from ...huggingface.runtime import AROUND, PRIVATE, runtime
from ...quantization.identifiers import PLAN
from ...quantization.layers import QuantizedLayer
from ...report import report
from ..runtime import groups
from ..tensor import layers, quantized
from ..tensor.local_config import unsharded_config
from ..tensor.plan import ShardingPlan
from . import memory, model_edits

#: Attributes of a model: how it was loaded, and why it could not be unsharded.
_LOAD_RECIPE = f"{PRIVATE}origin"
_FAULT = f"{PRIVATE}apart_fault"
#: Methods that a sharded model has instead of its class's own.
_METHODS = (
    "train",
    "add_adapter",
    "load_adapter",
    "dequantize",
    "generate",
    "generate_batch",
    "init_continuous_batching",
)
#: The method of every module with an embedding of its own.
RESIZE = "resize_token_embeddings"
#: The method of a model, and of every model in it.
SAVE = "save_pretrained"
#: The package whose hooks are removed.
_PARALLEL = __name__.rpartition(".data.")[0]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_HOOK_FLAGS = (
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
#: Caches that were filled while a model was sharded, by their `id`.
_caches: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_sharded: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class LoadRecipe:
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
        """The unsharded model. The caller's random state is not changed."""
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
            kwargs = {name: _kept(value) for name, value in self._kwargs.items()}
            found = self._load(self._cls, *self._args, **kwargs)
        return found[0] if isinstance(found, tuple) else found


def _kept(value: Any) -> Any:
    return copy.deepcopy(value) if hasattr(value, "to_dict") else value


def record_origin(model: nn.Module, origin: LoadRecipe | None, rank: int) -> None:
    """Record how ``model`` was loaded, if it may be unsharded, and which shards this process holds."""
    _sharded.add(model)
    if origin is not None:
        vars(model)[_LOAD_RECIPE] = (origin, rank)


def sharded_models() -> list[nn.Module]:
    """The models of this process that were sharded as they were loaded, and still are."""
    return [model for model in _sharded if PLAN in vars(model)]


_CHANGED = "was changed since it was loaded, and what other processes hold of it is not known here"


def record_cache(cache: Any) -> None:
    """Record that ``cache`` was filled by one rank of a sharded model."""
    if _caches.get(id(cache)) is not cache:
        try:
            _caches[id(cache)] = cache
        except TypeError:  # a tuple, whose tensors do not fit the whole model's and are refused there
            return


def models_in(model: nn.Module) -> list[nn.Module]:
    """``model`` and the models in it, which a script may call by themselves: a backbone, an encoder."""
    from transformers import PreTrainedModel

    return [part for part in model.modules() if part is model or isinstance(part, PreTrainedModel)]


def can_unshard(model: nn.Module) -> bool:
    """Whether ``model`` was sharded by default, and how it was loaded is known."""
    return _LOAD_RECIPE in vars(model)


def unshard(model: nn.Module, reason: str) -> None:
    """Unshard ``model`` on this rank.

    Args:
        reason: Why the ranks diverge.

    Raises:
        ParallelError: It cannot be; ``model`` stays as it is.
    """
    own = vars(model)
    if PLAN not in own:
        return
    fault = own.get(_FAULT) or _unsharded(model)
    if fault:
        own[_FAULT] = fault
        raise ParallelError(
            f"{reason}. This {type(model).__name__} is sharded over the processes, and cannot go on "
            f"unsharded: {fault}. Call it on every rank with the same, or start the script with "
            "LITEBOOST_TP=1."
        )
    sentence = (
        f"{reason}. So {type(model).__name__} was loaded whole by this process, which goes on by itself. "
        "With LITEBOOST_TP=1 each process has a model of its own from the start; with LITEBOOST_TP=N they "
        "share one, and this is an error."
    )
    report.note(sentence)
    warnings.warn(sentence, stacklevel=2)


def unshard_for(model: nn.Module, call: str) -> nn.Module:
    """``model``, which was sharded by default, unsharded: what holds a shard cannot do ``call``."""
    divergence = groups.divergence
    divergence.reason = divergence.reason or f"{call} needs the whole model in every process"
    unshard(model, divergence.reason)
    return model


def _unsharded(model: nn.Module) -> str:
    """Unshard ``model``; returns why that is impossible, or an empty string."""
    own = vars(model)
    if _LOAD_RECIPE not in own:
        return "it was sharded by shard(), or LITEBOOST_TP says that it is sharded"
    plan: ShardingPlan = own[PLAN]
    origin, rank = own[_LOAD_RECIPE]
    reason = memory.why_does_not_fit(model, plan)
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


def _changed(model: nn.Module, twin: nn.Module, plan: ShardingPlan, rank: int) -> str:
    """Why the shards of ``model`` are not those of ``twin``, or an empty string. ``twin`` gets its dtypes."""
    theirs = dict(twin.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in plan.shardings:
            continue
        whole = theirs.get(name)
        if whole is None:
            return f"the checkpoint gives it no {name} any more"
        whole.data = whole.data.to(parameter.device, parameter.dtype)
        if not _same(parameter.data, plan.spec(name).local(whole.data, rank)):
            return (
                f"{name} was changed since it was loaded, and other processes' parts of it are not known here"
            )
    for name, module in quantized.modules_of(model).items():
        sharding = plan.shardings.get(quantized.parameter_of(name, module))
        if sharding is None:
            continue
        there = twin.get_submodule(name)
        specs = quantized.Weight.of(there).specs(sharding, plan.world_size)
        held = quantized.local_shard(there.unpacked(), specs, rank).tensors()
        kept = module.unpacked().tensors()
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


def _adopt(model: nn.Module, twin: nn.Module, plan: ShardingPlan) -> None:
    """Replace what sharding has changed in ``model`` by that of ``twin``, which is unsharded."""
    for name in _sharded_modules(model, plan):
        here, there = model.get_submodule(name), twin.get_submodule(name)
        if isinstance(here, QuantizedLayer):
            _adopt_quantized(here, there)
        else:
            _adopt_parameters(here, there, name, plan)
            _adopt_attributes(here, there)
    for name, attributes in plan.attributes.items():
        here, there = vars(model.get_submodule(name)), vars(twin.get_submodule(name))
        for attribute in attributes:
            if attribute.startswith("config."):
                here["config"] = unsharded_config(here["config"])
            else:
                here[attribute] = there[attribute]
    wanted = dict(twin.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in wanted and parameter.is_leaf:
            parameter.requires_grad_(wanted[name].requires_grad)
    own = vars(model)
    for name in (*_METHODS, PLAN, _LOAD_RECIPE, model_edits.BEFORE, "_cache"):
        own.pop(name, None)
    for module in model.modules():
        for name in (RESIZE, SAVE, AROUND):
            vars(module).pop(name, None)
        _drop_hooks(module)
    if _caches:
        for part in models_in(model):
            vars(part)[AROUND] = _refuse_caches


def _sharded_modules(model: nn.Module, plan: ShardingPlan) -> list[str]:
    """The modules that hold shards, or communicate."""
    modules = dict(model.named_modules(remove_duplicate=False))
    names = {*plan.roles, *plan.deferred, *plan.deferred.values()}
    for name in (*plan.shardings, *plan.rank0_only):
        names.add(name if name in modules else name.rpartition(".")[0])
    return sorted(names & set(modules))


def _adopt_quantized(here: nn.Module, there: nn.Module) -> None:
    hooks = {name: vars(here)[name] for name in (*_HOOKS, *_HOOK_FLAGS)}
    here.__class__ = there.__class__
    vars(here).clear()
    vars(here).update({**vars(there), **hooks})


def _adopt_parameters(here: nn.Module, there: nn.Module, name: str, plan: ShardingPlan) -> None:
    for local, parameter in there._parameters.items():
        full = f"{name}.{local}" if name else local
        if full in plan.shardings or full in plan.rank0_only:
            here._parameters[local] = parameter


def _adopt_attributes(here: nn.Module, there: nn.Module) -> None:
    here.__class__ = there.__class__
    for name in layers.OWN_ATTRIBUTES:
        if name in vars(there):
            vars(here)[name] = vars(there)[name]
        elif name in vars(here):
            del vars(here)[name]


def _drop_hooks(module: nn.Module) -> None:
    """Remove the hooks by which ``module`` communicates, or compares its inputs."""
    for kind in _HOOKS:
        hooks = vars(module)[kind]
        for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
            del hooks[key]
            for flags in _HOOK_FLAGS:
                vars(module)[flags].pop(key, None)


def _is_ours(hook: Any) -> bool:
    return isinstance(hook, functools.partial) and (hook.func.__module__ or "").startswith(_PARALLEL)


def _refuse_caches(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``call``, the forward of a model that was sharded, which cannot continue with caches of that time.

    Raises:
        ParallelError: It is given one.
    """
    for value in _values(args, kwargs):
        if value is not None and _caches.get(id(value)) is value:
            raise ParallelError(
                f"this {type(value).__name__} was filled while the model was sharded, and holds the keys and "
                "values of one process's heads. The processes work independently now: begin with a new "
                "cache, or start the script with LITEBOOST_TP=1."
            )
    return call(*args, **kwargs)


def _values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    yield from args
    yield from kwargs.values()
