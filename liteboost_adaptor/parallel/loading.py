"""Where `from_pretrained` meets the ranks: each reads its part of the files straight into what it holds.

The plan is made of the model on the meta device, before a file is opened. Then its parameters get the sizes
of this rank, and transformers loads them as ever, from tensors of which it is given the rank's part.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import __version__, config
from ..checkpoint.files import File, Slice
from ..errors import CheckpointError, ParallelError, PlanError
from ..huggingface.runtime import runtime
from ..report import report
from . import (
    alike,
    groups,
    layout,
    offline,
    presence,
    quantized,
    quantized_loading,
    shard,
    sources,
    starts,
    wrappers,
)
from . import mesh as meshes
from .circle import Apart
from .groups import Group
from .mesh import Mesh
from .plan import Layout, Plan, undivided
from .quantized import Weight
from .quantized_loading import Reading
from .undivided import Origin, note_origin

_MODELING = "transformers.modeling_utils"
_ARGUMENTS = ["model", "state_dict", "checkpoint_files", "load_config", "expected_keys"]
#: Values of ``device_map`` that leave the choice to transformers.
_ANY_DEVICE = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass
class _Pending:
    """A model between loading and the end of it.

    Attributes:
        is_cut: Whether its parameters have the sizes of this rank.
        weights: Those that are integers then, as they are undivided.
        origin: How it can be loaded whole, where ranks may part.
    """

    plan: Plan
    mesh: Mesh
    forms: dict[str, str]
    is_cut: bool
    weights: dict[str, Weight]
    origin: Origin | None


def follow(runtime: Any) -> None:
    """Divide models that are loaded while ``runtime`` prepares models."""
    runtime.extend(_extend)


def _extend(hooks: Any, settings: config.Settings) -> None:
    if _started() == 1 and not meshes.is_for_several(settings):
        return
    modeling = sys.modules[_MODELING]
    load = getattr(modeling.PreTrainedModel, "_load_pretrained_model", None)
    if load is None or list(inspect.signature(load).parameters) != _ARGUMENTS:
        report.note(
            "Models are not divided as they are loaded: this transformers loads them in a way that is not "
            "known. liteboost_adaptor.shard(model) divides a loaded one."
        )
        return
    ranks = _Loading(settings)
    hooks.set_attribute(_MODELING, "PreTrainedModel._load_pretrained_model", ranks.wrap_load)
    if ranks.is_wanted:
        hooks.set_attribute(_MODELING, "PreTrainedModel.from_pretrained", ranks.wrap_from_pretrained)
        hooks.set_attribute(_MODELING, "PreTrainedModel._finalize_model_loading", ranks.wrap_finalize)
        hooks.set_attribute(_MODELING, "check_and_set_device_map", ranks.wrap_device_map)
        wrappers.hook(hooks, lambda: runtime.active is settings)


def _started() -> int:
    """How many processes a launcher has started; 1 without one."""
    return (config.launched() or (0, 1))[1]


class _Loading:
    """What is done to models loaded under ``settings``."""

    def __init__(self, settings: config.Settings) -> None:
        self.settings = settings
        self.is_wanted = settings.level >= 2 and meshes.is_asked(settings)
        #: Nobody has asked for several processes: what a script does that gives each its own work is right.
        self.is_default = settings.tp == 0 and not meshes.is_for_several(settings)
        self._pending: weakref.WeakKeyDictionary[nn.Module, _Pending] = weakref.WeakKeyDictionary()
        #: Of the calls of ``from_pretrained`` of each thread, the inner ones last.
        self._calls = _Calls()

    def wrap_load(self, original: Any) -> Any:
        load = original.__func__

        @functools.wraps(load)
        def _load_pretrained_model(
            model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, expected_keys: Any = None
        ) -> Any:
            arguments = (checkpoint_files, load_config, expected_keys)
            sizes = meshes.sizes(self.settings, _started()) if self.is_wanted else {"tp": 1}
            reason = _why_whole(model, load_config, sizes["tp"]) if self.is_wanted else "not asked for"
            if self._calls.is_whole:  # of one rank alone
                return load(model, state_dict, *arguments)
            facts = {"settings": config.spelled(self.settings), "version": __version__}
            facts["model"] = type(model).__name__
            if reason:
                _pass_by({**facts, "whole": reason})
                offline.refuse_whole(checkpoint_files, reason)
                if self.is_wanted:
                    _say(f"{type(model).__name__} is loaded whole by every process: {reason}.")
                return load(model, state_dict, *arguments)
            plan = undivided(type(model).__name__)
            if sizes["tp"] > 1:
                model.tie_weights(recompute_mapping=False)  # what is one parameter is divided as one
                weights = quantized_loading.weights_of(model, load_config.hf_quantizer)
                with quantized.as_plain(model):
                    found = layout.of(model, quantized.units_of(weights))
                reason = "" if found.cuts else "no part of it is recognised"
                if not reason and weights:
                    reason = _why_not_in_units(model, found, sizes["tp"], self.settings.ep)
                if not reason:
                    plan = found.plan(sizes["tp"], self.settings.ep)
                    reason = quantized_loading.why_not(weights, load_config.hf_quantizer, plan)
                if reason:
                    _pass_by({**facts, "whole": reason})
                    _say(f"{plan.model} is loaded whole by every process: {reason}.")
                    return load(model, state_dict, *arguments)
            facts = {**facts, "plan": plan.digest(), "dtype": str(load_config.dtype), "whole": ""}
            if not self._meet(facts, plan.model, checkpoint_files):
                return load(model, state_dict, *arguments)
            with self._calls.together():
                mesh = meshes.join(self.settings)
                return self._load(load, model, state_dict, arguments, plan, mesh)

        return staticmethod(_load_pretrained_model)

    def wrap_from_pretrained(self, original: Any) -> Any:
        function = original.__func__

        @functools.wraps(function)
        def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
            origin = Origin(self._load_whole(function), cls, args, kwargs) if self.is_default else None
            with self._calls.of(origin):
                return function(cls, *args, **kwargs)

        return classmethod(from_pretrained)

    def _load_whole(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def load(cls: type, *args: Any, **kwargs: Any) -> Any:
            with self._calls.whole():
                return function(cls, *args, **kwargs)

        return load

    def _meet(self, facts: dict[str, Any], model: str, files: Any) -> bool:
        """Whether the ranks load ``model`` together; else each loads it whole, if that may be.

        Raises:
            ParallelError: They do not, and division was asked for, or ranks have other settings.
        """
        reason = groups.ways.reason
        if not reason:
            try:
                groups.world().meet(facts, _why_apart, presence.limits.to_come)
                return True
            except Apart as apart:
                reason = str(apart)
            except ParallelError as fault:  # there is nobody to ask
                reason = str(fault)
        size = _started()
        if _OTHER_START in reason or _OTHER_VERSION in reason:
            raise ParallelError(f"{reason}. Start every rank with the same program, model and settings.")
        if not self.is_default:
            raise ParallelError(reason if starts.hint(size) in reason else f"{reason}{starts.hint(size)}")
        offline.refuse_whole(files, reason)
        if not groups.ways.reason:
            sentence = (
                f"{model} is not divided over {size} processes: {reason}. Each loads the whole of it and "
                "goes on by itself. With LITEBOOST_TP=1 they do so at once; with LITEBOOST_TP=N they share "
                "it, and this is an error."
            )
            report.note(sentence)
            warnings.warn(sentence, stacklevel=2)
        groups.ways.reason = reason
        return False

    def _load(
        self, load: Callable[..., Any], model: Any, state_dict: Any, arguments: Any, plan: Plan, mesh: Mesh
    ) -> Any:
        files, load_config, expected_keys = arguments
        is_divided = mesh.tensor.size > 1
        quantizer = load_config.hf_quantizer
        weights = quantized_loading.weights_of(model, quantizer)
        # With a cache of integers and weights as they are, parts are read as those of any model.
        is_plain = not weights and offline.is_divided(files)
        is_of_integers = state_dict is not None and quantized_loading.is_ours(quantizer) and not is_plain
        is_read_in_parts = (
            is_divided
            and files
            and files[0].endswith(".safetensors")
            and (state_dict is None or is_of_integers or is_plain)
        )
        forms = shard.norm_forms(model, plan) if is_divided else {}
        origin = self._calls.origin
        pending = _Pending(plan, mesh, forms, bool(is_read_in_parts), weights, origin)
        hosts = groups.gathered(mesh.tensor, groups.host())
        with groups.together(mesh.world):
            if not is_divided:
                offline.refuse_whole(files, "LITEBOOST_TP=1")
                done = load(model, state_dict, *arguments)
            elif not is_read_in_parts:
                report.note(
                    f"{plan.model} was loaded whole by every process and then divided: its files are no "
                    "safetensors."
                )
                done = load(model, state_dict, *arguments)
            else:
                mapping, rank = load_config.weight_mapping, mesh.tensor.rank
                if is_of_integers:
                    if weights and not quantizer.pre_quantized:
                        offline.refuse_whole(files, "its weights are rounded as they are read")
                    reading = quantized_loading.read(model, quantizer, state_dict, plan, rank, hosts, mapping)
                else:
                    reading = Reading(*_tensors(model, files, plan, mesh.tensor, mapping), plan)
                shard.cut(model, plan, mesh.tensor)
                with _divided_behind(reading.late, sources.CutLast(reading.plan, rank)):
                    done = load(model, reading.tensors, files, load_config, expected_keys)
        self._pending[model] = pending
        return done

    def wrap_finalize(self, original: Any) -> Any:
        finalize = original.__func__

        @functools.wraps(finalize)
        def _finalize_model_loading(model: Any, load_config: Any, loading_info: Any) -> Any:
            info = finalize(model, load_config, loading_info)
            pending = self._pending.pop(model, None)
            if pending is not None:
                with self._calls.together(), groups.together(pending.mesh.world):
                    _agree_on_missing(model, info.missing_keys, pending)
                    _share(model, pending)
                    if quantized_loading.is_ours(load_config.hf_quantizer):
                        load_config.hf_quantizer.check_loaded(model)  # which it will, but each rank by itself
            return info

        return staticmethod(_finalize_model_loading)

    def wrap_device_map(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def check_and_set_device_map(device_map: Any) -> Any:
            named = str(device_map) if isinstance(device_map, (str, torch.device)) else ""
            own = groups.own_device()
            is_ours = named in _ANY_DEVICE or (named in ("npu", "cuda") and own.type == "npu")
            if is_ours and not _owner():
                device_map = own
            return original(device_map)

        return check_and_set_device_map


def _share(model: nn.Module, pending: _Pending) -> None:
    """Let the ranks work together on ``model``, which is loaded."""
    if pending.mesh.tensor.size == 1:
        return shard.attach(model, pending.plan, pending.mesh)
    note_origin(model, pending.origin, pending.mesh.tensor.rank)
    if not pending.is_cut:
        shard.cut(model, pending.plan, pending.mesh.tensor)
    quantized_loading.note_experts(model, pending.weights, pending.plan)
    shard.become_part(model, pending.plan, pending.mesh, pending.forms)
    if pending.origin is not None:
        alike.remember(model, pending.plan.cuts, pending.plan.once)


def _say(sentence: str) -> None:
    report.note(sentence)
    if config.launched()[0] == 0:
        warnings.warn(sentence, stacklevel=2)


#: What reasons have in them where ranks were started in different ways, which is no other work but a mistake.
_OTHER_START = "different settings ("
_OTHER_VERSION = "different version ("


def _why_apart(found: dict[int, dict[str, Any]]) -> str:
    ranks = sorted(found)
    return starts.difference(ranks, [found[rank] for rank in ranks])


def _pass_by(facts: dict[str, Any]) -> None:
    """Say that this process loads a model by itself, where others may wait for it to share theirs.

    Raises:
        ParallelError: They have other settings.
    """
    if groups.ways.reason or not (config.agent_store() or groups.has_met()):
        return
    reason = groups.world().pass_by(facts, _why_apart)
    if _OTHER_START in reason or _OTHER_VERSION in reason:
        raise ParallelError(f"{reason}. Start every rank with the same program, model and settings.")


class _Calls(threading.local):
    """The calls of ``from_pretrained`` that a thread is in."""

    def __init__(self) -> None:
        self._origins: list[Origin | None] = []
        self._depth = 0
        self._stack = contextlib.ExitStack()

    @property
    def origin(self) -> Origin | None:
        """Of the innermost."""
        return self._origins[-1] if self._origins else None

    @property
    def is_whole(self) -> bool:
        """Whether a model is loaded whole for one that was divided."""
        return self._depth > 0

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """No model is divided while it lasts."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @contextlib.contextmanager
    def of(self, origin: Origin | None) -> Iterator[None]:
        """One call; what ranks do together in it is over with it."""
        self._origins.append(origin)
        try:
            yield
        finally:
            self._origins.pop()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A part of a call that the ranks make together."""
        with groups.world().inside():
            yield


def _owner() -> str:
    """Who else uses the processes, or an empty string."""
    launcher = config.data_parallel_launcher()
    if launcher:
        return f"{launcher} has started the processes, each of which works on a model of its own"
    state = sys.modules.get("accelerate.state")
    if state is not None and (state.PartialState._shared_state or state.AcceleratorState._shared_state):
        return "an Accelerator or a Trainer owns the processes"
    modeling = sys.modules[_MODELING]
    if modeling.is_deepspeed_zero3_enabled():
        return "DeepSpeed owns the processes"
    if getattr(modeling, "is_fsdp_enabled", lambda: False)():
        return "FSDP owns the processes"
    return ""


def _why_not_in_units(model: nn.Module, in_units: Layout, size: int, whole_experts: bool) -> str:
    """Why integers, of which many stay together, are not divided where values would be, or an empty string.

    Raises:
        PlanError: The values could not be, either.
    """
    try:
        in_units.plan(size, whole_experts)
    except PlanError as fault:
        with quantized.as_plain(model):
            layout.of(model).plan(size, whole_experts)
        return f"{size} processes cannot share its integers ({str(fault).splitlines()[0]})"
    return ""


def _why_whole(model: nn.Module, load_config: Any, tp: int) -> str:
    """Why processes do not share a model that is being loaded, or an empty string."""
    if load_config.device_mesh is not None or getattr(model.config, "distributed_config", None) is not None:
        return "transformers' own parallelism was asked for"
    if load_config.hf_quantizer is not None and tp > 1:
        reason = quantized_loading.why_not_read(load_config.hf_quantizer)
        if reason:
            return reason
    if len({str(device) for device in (load_config.device_map or {}).values()}) > 1:
        return "device_map puts its parts on several devices"
    return _owner()


def _tensors(
    model: nn.Module, files: list[str], plan: Plan, group: Group, weight_mapping: Any
) -> tuple[dict[str, Slice], list[Any]]:
    """What is read of each tensor of ``files``, and the converters whose results are divided late."""
    stored = offline.tensors_of(
        files[0], plan, group.rank, lambda shapes: sources.of(model, shapes, plan, weight_mapping)
    )
    if stored is not None:
        return stored
    opened = [File(file) for file in files]
    shapes = {name: entry.shape for file in opened for name, entry in file.entries.items()}
    found = sources.of(model, shapes, plan, weight_mapping)
    tensors = {}
    for file in opened:
        for name in file.entries:
            part = found.parts.get(name)
            if part and part.is_left_out(group.rank, group.size):
                continue
            ranges = part.ranges(group.rank, group.size) if part else None
            tensors[name] = Slice(file, name, part.dim if part else 0, ranges)
    return tensors, found.late


@contextlib.contextmanager
def _divided_behind(converters: list[Any], last: sources.CutLast) -> Iterator[None]:
    """While it lasts, ``last`` stands behind the operations of ``converters``."""
    before = [converter.operations for converter in converters]
    for converter in converters:
        converter.operations = [*converter.operations, last]
    try:
        yield
    finally:
        for converter, operations in zip(converters, before, strict=True):
            converter.operations = operations


def _agree_on_missing(model: nn.Module, missing: Any, pending: _Pending) -> None:
    """Give every rank the same values where the checkpoint has none and each has drawn its own."""
    tensors = dict(model.state_dict(keep_vars=True))
    for name in sorted(missing):
        if name in pending.plan.cuts and pending.is_cut:
            raise CheckpointError(
                f"the checkpoint has no {name}, which {pending.plan.model} divides over "
                f"{pending.mesh.tensor.size} processes. Load it with LITEBOOST_TP=1 and save it, or load a "
                "whole checkpoint."
            )
        if name in tensors:
            groups.talk(pending.mesh.world, functools.partial(dist.broadcast, tensors[name].data, 0))
