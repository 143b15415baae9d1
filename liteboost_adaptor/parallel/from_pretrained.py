"""`from_pretrained` on several ranks: each reads its shards of the files straight into its parameters.

The plan is made from the model on the meta device, before a file is opened. Then its parameters get the sizes
of their shards, and transformers loads them as usual, from tensors that are the rank's shards.
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
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from .. import __version__, config, native
from ..checkpoint.files import File, Slice
from ..errors import CheckpointError, ParallelError, PlanError
from ..huggingface.runtime import runtime
from ..report import report
from . import shard
from .checkpoint import offline, quantized_reads, read_plan
from .checkpoint.quantized_reads import Reading
from .data import wrappers
from .data.unsharded import LoadRecipe, record_origin
from .runtime import groups, heartbeat, rendezvous
from .runtime import mesh as meshes
from .runtime.call_group import RanksDiverged
from .runtime.groups import Group
from .runtime.mesh import Mesh
from .tensor import layout, quantized
from .tensor.apply import norm_roundings, shard_parameters
from .tensor.plan import Layout, ShardingPlan, unsharded_plan
from .tensor.quantized import Weight

if TYPE_CHECKING:
    from ..engine.undo_stack import UndoStack
    from ..huggingface.runtime import Runtime

_MODELING = "transformers.modeling_utils"
_ARGUMENTS = ["model", "state_dict", "checkpoint_files", "load_config", "expected_keys"]
#: Values of ``device_map`` that leave the choice to transformers.
_ANY_DEVICE = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass
class _Pending:
    """A model between loading and the end of it.

    Attributes:
        is_cut: Whether its parameters have the sizes of their shards.
        weights: Those that are quantized then, unsharded.
        origin: How it can be loaded unsharded, where ranks may diverge.
    """

    plan: ShardingPlan
    mesh: Mesh
    roundings: dict[str, str]
    is_cut: bool
    weights: dict[str, Weight]
    origin: LoadRecipe | None


def register(runtime: Runtime) -> None:
    """Shard models that are loaded while ``runtime`` prepares models."""
    runtime.extend(_extend)


def _extend(stack: UndoStack, settings: config.Settings) -> None:
    if _started() == 1 and not meshes.needs_several_processes(settings):
        return
    modeling = sys.modules[_MODELING]
    load = getattr(modeling.PreTrainedModel, "_load_pretrained_model", None)
    if load is None or list(inspect.signature(load).parameters) != _ARGUMENTS:
        report.note(
            "Models are not sharded as they are loaded: this transformers loads them in a way that is not "
            "known. liteboost_adaptor.shard(model) shards a loaded one."
        )
        return
    ranks = _Loading(settings)
    stack.set_attribute(_MODELING, "PreTrainedModel._load_pretrained_model", ranks.wrap_load)
    if ranks.is_wanted:
        stack.set_attribute(_MODELING, "PreTrainedModel.from_pretrained", ranks.wrap_from_pretrained)
        stack.set_attribute(_MODELING, "PreTrainedModel._finalize_model_loading", ranks.wrap_finalize)
        stack.set_attribute(_MODELING, "check_and_set_device_map", ranks.wrap_device_map)
        wrappers.hook(stack, lambda: runtime.active is settings)


def _started() -> int:
    """How many processes a launcher has started; 1 without one."""
    return (config.launched() or (0, 1))[1]


class _Loading:
    """What is done to models loaded under ``settings``."""

    def __init__(self, settings: config.Settings) -> None:
        self.settings = settings
        self.is_wanted = settings.level >= 2 and meshes.is_requested(settings)
        #: Nobody has asked for several processes: what a script does that gives each its own work is right.
        self.is_default = settings.tp == 0 and not meshes.needs_several_processes(settings)
        self._pending: weakref.WeakKeyDictionary[nn.Module, _Pending] = weakref.WeakKeyDictionary()
        #: Of the calls of ``from_pretrained`` of each thread, the inner ones last.
        self._calls = _LoadCalls()

    def wrap_load(self, original: Any) -> Any:
        load = original.__func__

        @functools.wraps(load)
        def _load_pretrained_model(
            model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, expected_keys: Any = None
        ) -> Any:
            arguments = (checkpoint_files, load_config, expected_keys)
            sizes = meshes.sizes(self.settings, _started()) if self.is_wanted else {"tp": 1}
            reason = "not asked for"
            if self.is_wanted:
                reason = self._why_unsharded(model, load_config, sizes["tp"])
            if self._calls.is_whole:  # by one rank alone
                return load(model, state_dict, *arguments)
            facts = {"settings": config.spelled(self.settings), "version": __version__}
            facts["model"] = type(model).__name__
            if reason:
                _announce({**facts, "whole": reason})
                offline.refuse_unsharded(checkpoint_files, reason)
                if self.is_wanted:
                    _note_and_warn(f"{type(model).__name__} is loaded whole by every process: {reason}.")
                return load(model, state_dict, *arguments)
            plan = unsharded_plan(type(model).__name__)
            if sizes["tp"] > 1:
                model.tie_weights(recompute_mapping=False)  # tied parameters are sharded as one
                weights = quantized_reads.weights_of(model, load_config.hf_quantizer)
                with quantized.as_plain(model):
                    found = layout.infer_layout(model, quantized.granularities_of(weights))
                reason = "" if found.shardings else "no part of it is recognised"
                if not reason and weights:
                    reason = _why_not_in_units(model, found, sizes["tp"], self.settings.ep)
                if not reason:
                    plan = found.plan(sizes["tp"], self.settings.ep)
                    reason = quantized_reads.why_not(weights, load_config.hf_quantizer, plan)
                if reason:
                    _announce({**facts, "whole": reason})
                    _note_and_warn(f"{plan.model} is loaded whole by every process: {reason}.")
                    return load(model, state_dict, *arguments)
            facts = {**facts, "plan": plan.digest(), "dtype": str(load_config.dtype), "whole": ""}
            if not self._synchronize(facts, plan.model, checkpoint_files):
                return load(model, state_dict, *arguments)
            with self._calls.together():
                mesh = meshes.join(self.settings)
                return self._load(load, model, state_dict, arguments, plan, mesh)

        return staticmethod(_load_pretrained_model)

    def wrap_from_pretrained(self, original: Any) -> Any:
        function = original.__func__

        @functools.wraps(function)
        def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
            origin = LoadRecipe(self._load_whole(function), cls, args, kwargs) if self.is_default else None
            with self._calls.of(origin):
                return function(cls, *args, **kwargs)

        return classmethod(from_pretrained)

    def _load_whole(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def load(cls: type, *args: Any, **kwargs: Any) -> Any:
            with self._calls.whole():
                return function(cls, *args, **kwargs)

        return load

    def _why_unsharded(self, model: nn.Module, load_config: Any, tp: int) -> str:
        """Why a model that is being loaded is not shared, or an empty string.

        Raises:
            NativeLibraryError: It was asked for, and there are no compiled kernels.
        """
        if not self.is_default:
            native.require("a model that several processes share")
        if not native.load().loaded:
            return "the compiled kernels are missing"
        return _why_unsharded(model, load_config, tp)

    def _synchronize(self, facts: dict[str, Any], model: str, files: Any) -> bool:
        """Whether the ranks load ``model`` together; else each loads it unsharded, if that is allowed.

        Raises:
            ParallelError: They do not, and sharding was requested, or ranks have different settings.
        """
        reason = groups.divergence.reason
        if not reason:
            try:
                groups.world().synchronize(facts, _why_diverged, heartbeat.timeouts.start)
                return True
            except RanksDiverged as apart:
                reason = str(apart)
            except ParallelError as fault:  # there is nobody to ask
                reason = str(fault)
        size = _started()
        if _OTHER_START in reason or _OTHER_VERSION in reason:
            raise ParallelError(f"{reason}. Start every rank with the same program, model and settings.")
        if not self.is_default:
            raise ParallelError(
                reason if rendezvous.hint(size) in reason else f"{reason}{rendezvous.hint(size)}"
            )
        offline.refuse_unsharded(files, reason)
        if not groups.divergence.reason:
            sentence = (
                f"{model} is not sharded over {size} processes: {reason}. Each loads the whole of it and "
                "goes on by itself. With LITEBOOST_TP=1 they do so at once; with LITEBOOST_TP=N they share "
                "it, and this is an error."
            )
            report.note(sentence)
            warnings.warn(sentence, stacklevel=2)
        groups.divergence.reason = reason
        return False

    def _load(
        self,
        load: Callable[..., Any],
        model: Any,
        state_dict: Any,
        arguments: Any,
        plan: ShardingPlan,
        mesh: Mesh,
    ) -> Any:
        files, load_config, expected_keys = arguments
        is_sharded = mesh.tensor.size > 1
        quantizer = load_config.hf_quantizer
        weights = quantized_reads.weights_of(model, quantizer)
        # With a quantized cache and floating-point weights, shards are read as those of any model.
        is_plain = not weights and offline.is_sharded(files)
        is_quantized = state_dict is not None and quantized_reads.is_ours(quantizer) and not is_plain
        is_read_sharded = (
            is_sharded
            and files
            and files[0].endswith(".safetensors")
            and (state_dict is None or is_quantized or is_plain)
        )
        roundings = norm_roundings(model, plan) if is_sharded else {}
        origin = self._calls.origin
        pending = _Pending(plan, mesh, roundings, bool(is_read_sharded), weights, origin)
        hosts = groups.all_gather_object(mesh.tensor, groups.host())
        with groups.fail_together(mesh.world):
            if not is_sharded:
                offline.refuse_unsharded(files, "LITEBOOST_TP=1")
                done = load(model, state_dict, *arguments)
            elif not is_read_sharded:
                report.note(
                    f"{plan.model} was loaded whole by every process and then sharded: its files are no "
                    "safetensors."
                )
                done = load(model, state_dict, *arguments)
            else:
                mapping, rank = load_config.weight_mapping, mesh.tensor.rank
                if is_quantized:
                    if weights and not quantizer.pre_quantized:
                        offline.refuse_unsharded(files, "its weights are rounded as they are read")
                    reading = quantized_reads.read(model, quantizer, state_dict, plan, rank, hosts, mapping)
                else:
                    reading = Reading(*_read_tensors(model, files, plan, mesh.tensor, mapping), plan)
                shard_parameters(model, plan, mesh.tensor)
                with _sharding_after(reading.late, read_plan.ShardAfterConversion(reading.plan, rank)):
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
                with self._calls.together(), groups.fail_together(pending.mesh.world):
                    _agree_on_missing(model, info.missing_keys, pending)
                    _finish(model, pending)
                    if quantized_reads.is_ours(load_config.hf_quantizer):
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


def _finish(model: nn.Module, pending: _Pending) -> None:
    """Let the ranks work together on the loaded ``model``."""
    if pending.mesh.tensor.size == 1:
        return shard.share_calls(model, pending.plan, pending.mesh)
    record_origin(model, pending.origin, pending.mesh.tensor.rank)
    if not pending.is_cut:
        shard_parameters(model, pending.plan, pending.mesh.tensor)
    quantized_reads.record_experts(model, pending.weights, pending.plan)
    shard.shard_model(model, pending.plan, pending.mesh, pending.roundings)


def _note_and_warn(sentence: str) -> None:
    report.note(sentence)
    if config.launched()[0] == 0:
        warnings.warn(sentence, stacklevel=2)


#: Substrings of reasons where ranks were started in different ways, which is a mistake.
_OTHER_START = "different settings ("
_OTHER_VERSION = "different version ("


def _why_diverged(found: dict[int, dict[str, Any]]) -> str:
    ranks = sorted(found)
    return rendezvous.difference(ranks, [found[rank] for rank in ranks])


def _announce(facts: dict[str, Any]) -> None:
    """Publish that this process loads a model by itself, where others may wait for it.

    Raises:
        ParallelError: They have other settings.
    """
    if groups.divergence.reason or not (config.agent_store() or groups.is_connected()):
        return
    reason = groups.world().announce(facts, _why_diverged)
    if _OTHER_START in reason or _OTHER_VERSION in reason:
        raise ParallelError(f"{reason}. Start every rank with the same program, model and settings.")


class _LoadCalls(threading.local):
    """The calls of ``from_pretrained`` that a thread is in."""

    def __init__(self) -> None:
        self._origins: list[LoadRecipe | None] = []
        self._depth = 0
        self._stack = contextlib.ExitStack()

    @property
    def origin(self) -> LoadRecipe | None:
        """Of the innermost."""
        return self._origins[-1] if self._origins else None

    @property
    def is_whole(self) -> bool:
        """Whether a model is loaded to unshard another one."""
        return self._depth > 0

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """No model is sharded while it lasts."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @contextlib.contextmanager
    def of(self, origin: LoadRecipe | None) -> Iterator[None]:
        """One call."""
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


def _why_not_in_units(model: nn.Module, in_units: Layout, size: int, expert_parallel: bool) -> str:
    """Why quantized weights, of which many stay together, are not sharded where floats would be, or ''.

    Raises:
        PlanError: Floats could not be, either.
    """
    try:
        in_units.plan(size, expert_parallel)
    except PlanError as fault:
        with quantized.as_plain(model):
            layout.infer_layout(model).plan(size, expert_parallel)
        return f"{size} processes cannot share its integers ({str(fault).splitlines()[0]})"
    return ""


def _why_unsharded(model: nn.Module, load_config: Any, tp: int) -> str:
    """Why a model that is being loaded is not sharded, or an empty string."""
    if load_config.device_mesh is not None or getattr(model.config, "distributed_config", None) is not None:
        return "transformers' own parallelism was asked for"
    if load_config.hf_quantizer is not None and tp > 1:
        reason = quantized_reads.why_not_read(load_config.hf_quantizer)
        if reason:
            return reason
    if len({str(device) for device in (load_config.device_map or {}).values()}) > 1:
        return "device_map puts its parts on several devices"
    return _owner()


def _read_tensors(
    model: nn.Module, files: list[str], plan: ShardingPlan, group: Group, weight_mapping: Any
) -> tuple[dict[str, Slice], list[Any]]:
    """What is read of each tensor of ``files``, and the converters whose results are sharded."""
    stored = offline.tensors_of(
        files[0], plan, group.rank, lambda shapes: read_plan.plan_reads(model, shapes, plan, weight_mapping)
    )
    if stored is not None:
        return stored
    opened = [File(file) for file in files]
    shapes = {name: entry.shape for file in opened for name, entry in file.entries.items()}
    found = read_plan.plan_reads(model, shapes, plan, weight_mapping)
    tensors = {}
    for file in opened:
        for name in file.entries:
            part = found.reads.get(name)
            if part and part.is_skipped(group.rank, group.size):
                continue
            ranges = part.ranges(group.rank, group.size) if part else None
            tensors[name] = Slice(file, name, part.dim if part else 0, ranges)
    return tensors, found.late


@contextlib.contextmanager
def _sharding_after(converters: list[Any], last: read_plan.ShardAfterConversion) -> Iterator[None]:
    """Within the context, ``last`` is the last operation of ``converters``."""
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
        if name in pending.plan.shardings and pending.is_cut:
            raise CheckpointError(
                f"the checkpoint has no {name}, which {pending.plan.model} shards over "
                f"{pending.mesh.tensor.size} processes. Load it with LITEBOOST_TP=1 and save it, or load a "
                "whole checkpoint."
            )
        if name in tensors:
            groups.communicate(pending.mesh.world, functools.partial(dist.broadcast, tensors[name].data, 0))
