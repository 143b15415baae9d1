"""What a rank reads of the tensors of a checkpoint, derived from the shards of parameters that it holds.

Checkpoints name tensors otherwise than the model, and transformers converts some while it loads them
(experts become one tensor; q, k and v one layer). Where a shard can be traced back through these conversions,
only that shard is read. Other tensors are read whole, and sharded after the conversion.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import CheckpointError
from ..tensor.plan import ShardingPlan
from ..tensor.shard_spec import DimSharding, Segment, ShardSpec

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorRead:
    """Which slice of one checkpoint tensor each rank reads.

    The tensor covers indices ``[first, last)`` of the model parameter's sharded dimension: several checkpoint
    tensors may be concatenated into one parameter.

    Attributes:
        dim: The dimension of the checkpoint tensor along which it is sliced.
        sharding: How the parameter's dimension is sharded.
        first: Index in that dimension at which the tensor begins.
        last: Index behind its end.
        is_expert: It is one of several that are stacked, and ranks that do not hold it skip it.
    """

    dim: int
    sharding: DimSharding
    first: int
    last: int
    is_expert: bool = False

    def ranges(self, rank: int, world_size: int) -> tuple[tuple[int, int], ...]:
        """The ranges that ``rank`` reads, in order."""
        found = (
            (max(first, self.first) - self.first, min(last, self.last) - self.first)
            for first, last in self.sharding.ranges(rank, world_size)
        )
        return tuple((first, last) for first, last in found if first < last)

    def spec(self, world_size: int) -> ShardSpec:
        """The ranges of all ranks."""
        ranges = tuple(self.ranges(rank, world_size) for rank in range(world_size))
        return ShardSpec(self.dim, self.last - self.first, ranges)

    def is_skipped(self, rank: int, world_size: int) -> bool:
        """Whether it is an expert of other ranks."""
        return self.is_expert and not self.ranges(rank, world_size)


class ShardAfterConversion:
    """The last operation of a converter whose tensors were read whole: keeps the shards of a rank."""

    def __init__(self, plan: ShardingPlan, rank: int) -> None:
        self.plan, self.rank = plan, rank

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardAfterConversion:
        return self

    def convert(self, tensors: dict[str, Any], *, full_layer_name: str, **_: Any) -> dict[str, Any]:
        """This rank's shards of converted tensors."""
        name = full_layer_name.replace("*.", "0.")
        key = next((key for key in tensors if key in name), name)
        prefix, _, suffix = name.partition(key)
        return {key: self._local(f"{prefix}{key}{suffix}", value) for key, value in tensors.items()}

    def _local(self, name: str, value: Any) -> Any:
        tensor = value[0] if isinstance(value, list) else value
        return self.plan.spec(name).local(tensor, self.rank) if name in self.plan.shardings else value


@dataclass
class ReadPlan:
    """What is read of a checkpoint.

    Attributes:
        reads: Tensor of the checkpoint -> its shards; those that are not named are read whole.
        late: Converters whose results are sharded after the conversion.
    """

    reads: dict[str, TensorRead]
    late: list[Any]


def plan_reads(
    model: torch.nn.Module, shapes: Mapping[str, Shape], plan: ShardingPlan, weight_mapping: Iterable[Any]
) -> ReadPlan:
    """What is read of tensors of these names and shapes for ``model``, which is unsharded, on any device.

    Raises:
        CheckpointError: A tensor that is sharded has another shape than the model wants.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = list(weight_mapping or [])
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    wanted = model.state_dict()
    found = ReadPlan({}, [])
    groups: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    for key in shapes:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, wanted)
        if pattern is not None:
            groups.setdefault(name, (by_pattern[pattern], {}))[1].setdefault(pattern, []).append(key)
        elif name in plan.shardings:
            if tuple(wanted[name].shape) != shapes[key]:
                raise CheckpointError(
                    f"{key} of the checkpoint has shape {list(shapes[key])}, and {plan.model} wants "
                    f"{list(wanted[name].shape)} for {name}, which is sharded over {plan.world_size} "
                    "processes. Load it with LITEBOOST_TP=1, or load the checkpoint of this model."
                )
            sharding = plan.shardings[name]
            found.reads[key] = TensorRead(sharding.dim % len(shapes[key]), sharding, 0, sharding.size)
    wanted_shapes = {name: tuple(each.shape) for name, each in wanted.items()}
    _through_converters(groups, shapes, wanted_shapes, plan, found)
    return found


def _through_converters(
    groups: dict[str, tuple[Any, dict[str, list[str]]]],
    shapes: Mapping[str, Shape],
    wanted: Mapping[str, Shape],
    plan: ShardingPlan,
    found: ReadPlan,
) -> None:
    reads = {}
    for name, (converter, keys) in groups.items():
        if any(converter is late for late in found.late):
            continue
        traced = _trace(converter, name, keys, shapes, wanted, plan)
        if traced is None:
            found.late.append(converter)
        else:
            reads[name] = traced
    for name, traced in reads.items():
        if not any(groups[name][0] is late for late in found.late):
            found.reads.update(traced)


def _trace(
    converter: Any,
    name: str,
    keys: dict[str, list[str]],
    shapes: Mapping[str, Shape],
    wanted: Mapping[str, Shape],
    plan: ShardingPlan,
) -> dict[str, TensorRead] | None:
    """What is read of the tensors ``keys`` (by pattern) from which ``name`` is converted; None: unknown."""
    from transformers import core_model_loading
    from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist

    first = converter.target_patterns[0]
    targets = [name.replace(first, each) for each in converter.target_patterns] if first in name else [name]
    shardings = [plan.shardings.get(target) for target in targets]
    if not any(shardings):
        return {}
    operations = list(converter.operations)
    if [type(each) for each in operations] == [Chunk] and len(targets) == len(converter.target_patterns):
        return _chunked(operations[0].dim, shardings, keys, shapes, plan) if first in name else None
    split = getattr(core_model_loading, "Split", None)  # since transformers 5.24
    if split is not None and len(operations) == 1 and isinstance(operations[0], split):
        found = _split(operations[0].dim, shardings, [wanted.get(target) for target in targets], keys, shapes)
        if found is None:
            raise CheckpointError(
                f"a tensor of the checkpoint becomes {', '.join(targets)}, which {plan.world_size} processes "
                "share otherwise than by its rows. Load it with LITEBOOST_TP=1."
            )
        return found
    if len(targets) != 1 or shardings[0] is None:
        return None
    sharding, joined, stacked = shardings[0], None, 0
    if operations and type(operations[-1]) is Concatenate:
        joined = operations.pop().dim
    if operations and type(operations[-1]) is MergeModulelist and operations[-1].dim == 0:
        operations.pop()
        stacked = 1
    if operations or (joined is None and len(keys) > 1) or (joined or 0) < 0:
        return None
    return _joined(
        sharding, joined, stacked, [keys[p] for p in converter.source_patterns if p in keys], shapes
    )


def _natural_key(name: str) -> list[Any]:
    """Sort key by which 10 comes after 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _joined(
    sharding: DimSharding,
    joined: int | None,
    stacked: int,
    groups: list[list[str]],
    shapes: Mapping[str, Shape],
) -> dict[str, TensorRead] | None:
    found = {}
    start = 0
    dim = sharding.dim - stacked
    for keys in groups:
        # In the order in which transformers stacks them.
        for index, key in enumerate(sorted(keys, key=_natural_key)):
            if stacked and sharding.dim == 0:  # a whole expert
                size = shapes[key][0]
                of_all = DimSharding(0, (Segment(size * len(keys), len(keys)),))
                found[key] = TensorRead(0, of_all, index * size, (index + 1) * size, is_expert=True)
                start = sharding.size
                continue
            if len(shapes[key]) <= dim:
                return None
            size = shapes[key][dim]
            if sharding.dim == joined:
                if index and stacked:  # one of a stack: as the first
                    found[key] = TensorRead(dim, sharding, start - size, start)
                    continue
                found[key] = TensorRead(dim, sharding, start, start + size)
                start += size
            else:
                found[key] = TensorRead(dim, sharding, 0, sharding.size)
                start = size
    return found if start == sharding.size else None


def _split(
    dim: int,
    shardings: list[DimSharding | None],
    wanted: list[Shape | None],
    keys: dict[str, list[str]],
    shapes: Mapping[str, Shape],
) -> dict[str, TensorRead] | None:
    """What is read of one tensor of which several parameters are parts, each as long as its shard then is."""
    (key,) = next(iter(keys.values()))[:1]
    dim %= len(shapes[key])
    if None in wanted or any(sharding and sharding.dim % len(shapes[key]) != dim for sharding in shardings):
        return None
    segments: list[Segment] = []
    for sharding, shape in zip(shardings, wanted, strict=True):
        segments += sharding.segments if sharding else [Segment(shape[dim], 1)]  # one that every rank has
    whole = DimSharding(dim, tuple(segments))
    return {key: TensorRead(dim, whole, 0, whole.size)} if whole.size == shapes[key][dim] else None


def _chunked(
    dim: int,
    shardings: list[DimSharding | None],
    keys: dict[str, list[str]],
    shapes: Mapping[str, Shape],
    plan: ShardingPlan,
) -> dict[str, TensorRead] | None:
    """What is read of one tensor that is chunked into several parameters of equal length."""
    (key,) = next(iter(keys.values()))[:1]
    if None in shardings or len({sharding.dim for sharding in shardings}) > 1 or dim < 0:
        return None
    if shardings[0].dim != dim:
        return (
            {key: TensorRead(shardings[0].dim, shardings[0], 0, shardings[0].size)}
            if len(set(shardings)) == 1
            else None
        )
    size = plan.world_size
    if any(len({sharding.length(rank, size) for sharding in shardings}) > 1 for rank in range(size)):
        return None
    whole = DimSharding(dim, tuple(segment for sharding in shardings for segment in sharding.segments))
    return {key: TensorRead(dim, whole, 0, whole.size)} if whole.size == shapes[key][dim] else None
