"""The mesh of ranks along data, context, sequence and tensor parallelism.

Tensor parallelism is innermost: ranks that communicate most have neighboring numbers.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch.distributed as dist

from ...config import Settings
from ...errors import ParallelError
from . import groups
from .groups import Group

#: Their variables, from the outermost to the innermost.
NAMES = ("dp", "cp", "sp", "tp")


@dataclass(frozen=True)
class Mesh:
    """The groups that one rank belongs to.

    Attributes:
        world: All ranks.
        replica: Those that work on the same rows of a batch.
        tensor: Of these, those that hold the other shards of the weights.
        sequence: Of these, those that hold the same shards and other tokens of a prompt, in their order.
        context: Of these, those that pass on keys and values (ring attention).
        heads: Of these, those that exchange heads (Ulysses). A rank of ``sequence`` is ``context.rank *
            heads.size + heads.rank``.
        data: Those that hold the same in other replicas.
    """

    world: Group
    replica: Group
    tensor: Group
    sequence: Group
    context: Group
    heads: Group
    data: Group

    @property
    def is_first(self) -> bool:
        """Whether this rank is one of those that hold the weights and have the lowest numbers."""
        return self.world.rank < self.tensor.size


def is_requested(settings: Settings) -> bool:
    """Whether ``settings`` let several processes work together."""
    return settings.tp != 1 or needs_several_processes(settings)


def needs_several_processes(settings: Settings) -> bool:
    """Whether ``settings`` need several processes."""
    return any(getattr(settings, name) > 1 for name in NAMES)


def sizes(settings: Settings, world_size: int) -> dict[str, int]:
    """How many ranks there are along each of `NAMES`.

    Raises:
        ParallelError: What was asked for takes another number of processes.
    """
    asked = {name: getattr(settings, name) for name in NAMES}
    others = math.prod(asked[name] for name in NAMES if name != "tp")
    if not asked["tp"] and world_size % others == 0:
        asked["tp"] = world_size // others
    if math.prod(asked.values()) != world_size:
        said = ", ".join(
            f"LITEBOOST_{name.upper()}={asked[name]}"
            for name in reversed(NAMES)
            if getattr(settings, name) > 1
        )
        started = f"{world_size} processes have" if world_size > 1 else "one process has"
        needed = math.prod(asked.values()) if asked["tp"] else f"a multiple of {others}"
        raise ParallelError(
            f"{said or 'LITEBOOST_TP=1'}, and {started} been started. Start {needed}, or change or unset one "
            "of the sizes: they multiply to the number of processes."
        )
    return asked


def join(settings: Settings) -> Mesh:
    """The groups of this rank under ``settings``. Every rank calls it.

    Raises:
        ParallelError: As `sizes` and `groups.join` say.
    """
    world = groups.join()
    return _mesh(world, tuple(sizes(settings, world.size).values()))


@functools.lru_cache(maxsize=8)
def _mesh(world: Group, shape: tuple[int, ...]) -> Mesh:
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    own = [world.rank // stride % size for stride, size in zip(strides, shape, strict=True)]

    def along(*axes: str) -> Group:
        """The ranks that differ from this one along ``axes`` only."""
        free = [NAMES.index(axis) for axis in axes]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(world.size):
            place = [rank // stride % size for stride, size in zip(strides, shape, strict=True)]
            key = tuple(-1 if axis in free else index for axis, index in enumerate(place))
            found.setdefault(key, []).append(rank)
        mine = found[tuple(-1 if axis in free else index for axis, index in enumerate(own))]
        return _group(world, mine, list(found.values()))

    return Mesh(
        world=world,
        replica=along("cp", "sp", "tp"),
        tensor=along("tp"),
        sequence=along("cp", "sp"),
        context=along("cp"),
        heads=along("sp"),
        data=along("dp"),
    )


def _group(world: Group, mine: list[int], all_of_a_kind: list[list[int]]) -> Group:
    if len(mine) == world.size:
        return world
    rank = mine.index(world.rank)
    if len(mine) == 1:
        return Group("", rank, 1)
    # Every rank makes all, in the same order.
    made = groups.communicate(world, lambda: [dist.new_group(ranks) for ranks in all_of_a_kind])
    group = Group(made[all_of_a_kind.index(mine)].group_name, rank, len(mine))
    groups.register_group(group, mine)
    groups.share_memory(group)
    return group
