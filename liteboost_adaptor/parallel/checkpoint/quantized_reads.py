"""What a rank reads of a checkpoint for a quantized model, whether the checkpoint is quantized or not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ...checkpoint.files import LazyTensor, Slice
from ...quantization.checkpoint.parameter_names import ParameterNames
from ...quantization.identifiers import QUANT_METHOD
from ...quantization.layers import ShardedWeight
from ..tensor import quantized
from ..tensor.plan import ShardingPlan
from ..tensor.quantized import Weight
from ..tensor.shard_spec import ShardSpec
from . import read_plan

Tensors = Mapping[str, Slice | LazyTensor]


@dataclass(frozen=True)
class Reading:
    """What is read.

    Attributes:
        tensors: By their names in the checkpoint.
        late: Converters whose results are sharded after the conversion.
        plan: The plan by which they are.
    """

    tensors: dict[str, Any]
    late: list[Any]
    plan: ShardingPlan


def is_ours(quantizer: Any) -> bool:
    """Whether ``quantizer`` is ours, which loads tensors lazily."""
    return quantizer is not None and quantizer.quantization_config.quant_method == QUANT_METHOD


def why_not_read(quantizer: Any) -> str:
    """Why what ``quantizer`` loads is not read in shards, or an empty string."""
    if not is_ours(quantizer):
        # A model that is dequantized while it is loaded is like any other.
        is_plain = getattr(quantizer.quantization_config, "dequantize", False)
        return "" if is_plain else "its weights are quantized by another library"
    if quantizer.calibrates:
        return "it reads a text whole before its weights are quantized; quantize the checkpoint first"
    return ""


def weights_of(model: nn.Module, quantizer: Any) -> dict[str, Weight]:
    """The weights that are quantized, or that ``quantizer`` will quantize, by the names of parameters."""
    return quantized.weights_of(model, getattr(quantizer, "pending_experts", None))


def why_not(weights: dict[str, Weight], quantizer: Any, plan: ShardingPlan) -> str:
    """Why ``plan`` cannot shard ``weights``, or an empty string."""
    for embedding, head in getattr(quantizer, "heads", {}).items():
        of_embedding, of_head = plan.shardings.get(embedding), plan.shardings.get(head)
        if of_embedding is not None and of_embedding != of_head:
            return f"{head} is rounded from {embedding}, which is sharded otherwise"
    return quantized.why_not(weights, plan)


def read(
    model: nn.Module,
    quantizer: Any,
    tensors: Tensors,
    plan: ShardingPlan,
    rank: int,
    hosts: list[str],
    weight_mapping: Any,
) -> Reading:
    """What ``rank`` reads of ``tensors`` for ``model``, which is unsharded and on the meta device.

    Args:
        hosts: The host of each rank; ranks of one host read the same files.
    """
    weights = weights_of(model, quantizer)
    of = _owners(model, tensors, weight_mapping) if quantizer.pre_quantized else {}
    reading = plan if quantizer.pre_quantized else _for_rounding(weights, plan)
    shapes = {name: tuple(each.get_shape()) for name, each in tensors.items() if name not in of}
    with quantized.as_plain(model):
        found = read_plan.plan_reads(model, shapes, reading, weight_mapping)
    checked = _checked_by(rank, tensors, found.reads, hosts)
    made: dict[str, Any] = {}
    for name, tensor in tensors.items():
        source = found.reads.get(name)
        if source is not None and source.is_skipped(rank, plan.world_size):
            continue
        spec = source.spec(plan.world_size) if source else None
        if name in of:
            spec = _spec_of(*of[name], tuple(tensor.get_shape()), weights, plan)
        made[name] = spec.read(tensor, rank, name in checked) if spec else tensor
    if not quantizer.pre_quantized:
        quantizer.sharded_weights = _sharded_weights(weights, quantizer.heads, plan, reading, rank)
    return Reading(made, found.late, reading)


def record_experts(model: nn.Module, weights: dict[str, Weight], plan: ShardingPlan) -> None:
    """Record how experts that were quantized while they were loaded are sharded."""
    for name, module in quantized.modules_of(model).items():
        parameter = quantized.parameter_of(name, module)
        how = plan.shardings.get(parameter)
        if how is not None and "specs" not in vars(module):
            quantized.record_specs(module, weights[parameter].specs(how, plan.world_size))


def _owners(model: nn.Module, tensors: Iterable[str], weight_mapping: Any) -> dict[str, tuple[str, str]]:
    """Tensors of the checkpoint that are buffers of quantized weights -> (parameter, buffer)."""
    names, modules = ParameterNames(model, weight_mapping), quantized.modules_of(model)
    found = {}
    for name in tensors:
        target, pattern = names.target_of(name)
        owner, _, buffer = target.rpartition(".")
        if pattern is None and owner in modules and modules[owner]._buffers.get(buffer) is not None:
            found[name] = quantized.parameter_of(owner, modules[owner]), buffer
    return found


def _spec_of(
    parameter: str, buffer: str, shape: tuple[int, ...], weights: dict[str, Weight], plan: ShardingPlan
) -> ShardSpec | None:
    """None: the tensor is read whole, also if its shape is wrong, which the quantizer reports."""
    how, weight = plan.shardings.get(parameter), weights[parameter]
    if how is None or weight.buffer_specs()[buffer][0] != shape:
        return None
    return weight.specs(how, plan.world_size).get(buffer)


def _checked_by(rank: int, tensors: Tensors, parts: Mapping[str, Any], hosts: list[str]) -> set[str]:
    """The tensors with a checksum that ``rank`` reads whole to compare it; on each host one rank does."""
    done, found = [0] * len(hosts), set()
    near = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    for name, tensor in tensors.items():
        if isinstance(tensor, Slice) and tensor.digest:
            source = parts.get(name)
            ranks = [each for each in near if source is None or not source.is_skipped(each, len(hosts))]
            if ranks:
                checks = min(ranks, key=done.__getitem__)
                done[checks] += tensor.file.entries[tensor.name].nbytes
                found |= {name} if checks == rank else set()
    return found


def _for_rounding(weights: dict[str, Weight], plan: ShardingPlan) -> ShardingPlan:
    """``plan`` without what would take columns apart that have one scale, before they are rounded."""
    shardings = dict(plan.shardings)
    for name, weight in weights.items():
        how = shardings.get(name)
        if how is None or not weight.is_by_inputs(how):
            continue
        if weight.scheme.bits == 8 or weight.group_size(how, plan.world_size) != weight.scheme.group_size:
            del shardings[name]
    return replace(plan, shardings=shardings)


def _sharded_weights(
    weights: dict[str, Weight], heads: dict[str, str], plan: ShardingPlan, reading: ShardingPlan, rank: int
) -> dict[str, ShardedWeight]:
    read_as = {head: embedding for embedding, head in heads.items()}
    found = {}
    for name, weight in weights.items():
        how, before = plan.shardings.get(name), reading.shardings.get(read_as.get(name, name))
        if how is None:
            continue
        shard = weight.local(how, rank, plan.world_size)
        if before is not None:
            found[name] = ShardedWeight(shard.shape, shard.scheme, shard.shape, shard.scheme, _same)
        else:
            specs = weight.specs(how, plan.world_size)
            found[name] = ShardedWeight(
                weight.shape, weight.scheme, shard.shape, shard.scheme, _KeepShard(specs, rank)
            )
    return found


def _same(rounded: Any) -> Any:
    return rounded


@dataclass(frozen=True)
class _KeepShard:
    specs: dict[str, ShardSpec]
    rank: int

    def __call__(self, rounded: Any) -> Any:
        return quantized.local_shard(rounded, self.specs, self.rank)
