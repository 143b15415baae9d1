"""From what a rank holds of the parameters to what it reads of the tensors of a checkpoint.

Checkpoints name tensors otherwise than the model, and transformers puts some together while it loads them
(experts to one tensor, q, k and v to one layer). Where the way of a part through these operations is known,
only that part is read. Of the rest the whole is read, and divided behind the last operation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import CheckpointError
from ..tensor.plan import Cut, Part, Plan
from ..tensor.shard_spec import Share

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """What ranks read of one tensor of a checkpoint: of ``cut``, what lies in ``[first, last)``.

    Attributes:
        is_expert: It is one of several that are put together, and ranks that do not hold it leave it out.
    """

    dim: int
    cut: Cut
    first: int
    last: int
    is_expert: bool = False

    def ranges(self, rank: int, world_size: int) -> tuple[tuple[int, int], ...]:
        """The parts of the dimension, in order."""
        found = (
            (max(first, self.first) - self.first, min(last, self.last) - self.first)
            for first, last in self.cut.ranges(rank, world_size)
        )
        return tuple((first, last) for first, last in found if first < last)

    def share(self, world_size: int) -> Share:
        """The parts of all ranks."""
        ranges = tuple(self.ranges(rank, world_size) for rank in range(world_size))
        return Share(self.dim, self.last - self.first, ranges)

    def is_left_out(self, rank: int, world_size: int) -> bool:
        """Whether it is an expert of other ranks."""
        return self.is_expert and not self.ranges(rank, world_size)


class CutLast:
    """Stands behind a converter's operations where the whole of its tensors was read."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank

    def __deepcopy__(self, memo: dict[int, Any]) -> CutLast:
        return self

    def convert(self, tensors: dict[str, Any], *, full_layer_name: str, **_: Any) -> dict[str, Any]:
        """What this rank holds of what the operations made."""
        name = full_layer_name.replace("*.", "0.")
        key = next((key for key in tensors if key in name), name)
        prefix, _, suffix = name.partition(key)
        return {key: self._held(f"{prefix}{key}{suffix}", value) for key, value in tensors.items()}

    def _held(self, name: str, value: Any) -> Any:
        tensor = value[0] if isinstance(value, list) else value
        cut = self.plan.cuts.get(name)
        return value if cut is None else cut.held(tensor, self.rank, self.plan.world_size)


@dataclass
class Sources:
    """What is read of a checkpoint.

    Attributes:
        parts: Tensor of the checkpoint -> its part; of those not named the whole is read.
        late: Converters whose results are divided behind their operations.
    """

    parts: dict[str, Source]
    late: list[Any]


def of(
    model: torch.nn.Module, shapes: Mapping[str, Shape], plan: Plan, weight_mapping: Iterable[Any]
) -> Sources:
    """What is read of tensors of these names and shapes for ``model``, which is whole and on any device.

    Raises:
        CheckpointError: A tensor that is divided has another shape than the model wants.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = list(weight_mapping or [])
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    wanted = model.state_dict()
    found = Sources({}, [])
    groups: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    for key in shapes:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, wanted)
        if pattern is not None:
            groups.setdefault(name, (by_pattern[pattern], {}))[1].setdefault(pattern, []).append(key)
        elif name in plan.cuts:
            if tuple(wanted[name].shape) != shapes[key]:
                raise CheckpointError(
                    f"{key} of the checkpoint has shape {list(shapes[key])}, and {plan.model} wants "
                    f"{list(wanted[name].shape)} for {name}, which is divided over {plan.world_size} "
                    "processes. Load it with LITEBOOST_TP=1, or load the checkpoint of this model."
                )
            cut = plan.cuts[name]
            found.parts[key] = Source(cut.dim % len(shapes[key]), cut, 0, cut.size)
    _through_converters(groups, shapes, plan, found)
    return found


def _through_converters(
    groups: dict[str, tuple[Any, dict[str, list[str]]]],
    shapes: Mapping[str, Shape],
    plan: Plan,
    found: Sources,
) -> None:
    parts = {}
    for name, (converter, keys) in groups.items():
        if any(converter is late for late in found.late):
            continue
        way = _way(converter, name, keys, shapes, plan)
        if way is None:
            found.late.append(converter)
        else:
            parts[name] = way
    for name, way in parts.items():
        if not any(groups[name][0] is late for late in found.late):
            found.parts.update(way)


def _way(
    converter: Any, name: str, keys: dict[str, list[str]], shapes: Mapping[str, Shape], plan: Plan
) -> dict[str, Source] | None:
    """The parts of the tensors ``keys`` (by pattern) from which ``name`` is made; None: not known."""
    from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist

    first = converter.target_patterns[0]
    targets = [name.replace(first, each) for each in converter.target_patterns] if first in name else [name]
    cuts = [plan.cuts.get(target) for target in targets]
    if not any(cuts):
        return {}
    operations = list(converter.operations)
    if [type(each) for each in operations] == [Chunk] and len(targets) == len(converter.target_patterns):
        return _chunked(operations[0].dim, cuts, keys, shapes, plan) if first in name else None
    if len(targets) != 1 or cuts[0] is None:
        return None
    cut, joined, stacked = cuts[0], None, 0
    if operations and type(operations[-1]) is Concatenate:
        joined = operations.pop().dim
    if operations and type(operations[-1]) is MergeModulelist and operations[-1].dim == 0:
        operations.pop()
        stacked = 1
    if operations or (joined is None and len(keys) > 1) or (joined or 0) < 0:
        return None
    return _joined(cut, joined, stacked, [keys[p] for p in converter.source_patterns if p in keys], shapes)


def _naturally(name: str) -> list[Any]:
    """So that 10 comes behind 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _joined(
    cut: Cut, joined: int | None, stacked: int, groups: list[list[str]], shapes: Mapping[str, Shape]
) -> dict[str, Source] | None:
    found = {}
    start = 0
    dim = cut.dim - stacked
    for keys in groups:
        # As transformers puts them together.
        for index, key in enumerate(sorted(keys, key=_naturally)):
            if stacked and cut.dim == 0:  # an expert, which a rank reads or does not
                size = shapes[key][0]
                of_all = Cut(0, (Part(size * len(keys), len(keys)),))
                found[key] = Source(0, of_all, index * size, (index + 1) * size, is_expert=True)
                start = cut.size
                continue
            if len(shapes[key]) <= dim:
                return None
            size = shapes[key][dim]
            if cut.dim == joined:
                if index and stacked:  # one of a stack: as the first
                    found[key] = Source(dim, cut, start - size, start)
                    continue
                found[key] = Source(dim, cut, start, start + size)
                start += size
            else:
                found[key] = Source(dim, cut, 0, cut.size)
                start = size
    return found if start == cut.size else None


def _chunked(
    dim: int, cuts: list[Cut | None], keys: dict[str, list[str]], shapes: Mapping[str, Shape], plan: Plan
) -> dict[str, Source] | None:
    """Of one tensor that is chunked into several parameters, which must stay equally long."""
    (key,) = next(iter(keys.values()))[:1]
    if None in cuts or len({cut.dim for cut in cuts}) > 1 or dim < 0:
        return None
    if cuts[0].dim != dim:
        return {key: Source(cuts[0].dim, cuts[0], 0, cuts[0].size)} if len(set(cuts)) == 1 else None
    size = plan.world_size
    if any(len({cut.length(rank, size) for cut in cuts}) > 1 for rank in range(size)):
        return None
    whole = Cut(dim, tuple(part for cut in cuts for part in cut.parts))
    return {key: Source(dim, whole, 0, whole.size)} if whole.size == shapes[key][dim] else None
