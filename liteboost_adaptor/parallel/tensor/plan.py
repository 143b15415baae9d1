"""The plan: which part of which parameter a rank holds, and where ranks exchange what they computed.

Plain data. `layout.of` works it out from a model on the meta device, before any file is opened.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from ...errors import PlanError

#: What modules of a plan do beside computing on what they hold.
SUM = "sum"  # a linear layer whose output is added over the ranks
SUM_OUTPUT = "sum_output"  # any module whose output is added over the ranks
EXPERTS = "experts"  # whole experts of many; what each rank's give is added over the ranks
EMBEDDING = "embedding"  # rows of the vocabulary; the output is added over the ranks
HEAD = "head"  # rows of the vocabulary; the outputs are put together
NORM = "norm"  # a norm over all heads: the sums of squares are added over the ranks
ROLES = (SUM, SUM_OUTPUT, EXPERTS, EMBEDDING, HEAD, NORM)
#: The largest world size that is tried when others are proposed.
_MOST_RANKS = 64


@dataclass(frozen=True)
class Part:
    """Consecutive elements of one dimension: ``units`` equal runs, none of which is divided.

    Each rank holds as many of them as any other, give or take one; with fewer units than ranks, neighbouring
    ranks hold the same one.
    """

    size: int
    units: int

    def span(self, rank: int, world_size: int) -> tuple[int, int]:
        """First element of the rank's, and the one behind its last."""
        width = self.size // self.units
        first = self.units * rank // world_size
        last = first + 1 if self.units < world_size else self.units * (rank + 1) // world_size
        return first * width, last * width


@dataclass(frozen=True)
class Cut:
    """How one dimension of a parameter is divided: by parts, such as q, k and v of a fused projection."""

    dim: int
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Of the whole dimension."""
        return sum(part.size for part in self.parts)

    def ranges(self, rank: int, world_size: int) -> list[tuple[int, int]]:
        """The (first, last + 1) that ``rank`` holds, in order; adjacent ones are one."""
        found: list[tuple[int, int]] = []
        start = 0
        for part in self.parts:
            first, last = part.span(rank, world_size)
            if found and found[-1][1] == start + first:
                found[-1] = (found[-1][0], start + last)
            elif last > first:
                found.append((start + first, start + last))
            start += part.size
        return found

    def length(self, rank: int, world_size: int) -> int:
        """How many elements of the dimension ``rank`` holds."""
        return sum(last - first for first, last in self.ranges(rank, world_size))

    def held(self, tensor: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
        """The part of ``tensor`` that ``rank`` holds, in memory of its own."""
        ranges = self.ranges(rank, world_size)
        parts = [tensor.narrow(self.dim, first, last - first) for first, last in ranges]
        if len(parts) > 1:
            return torch.cat(parts, dim=self.dim)
        return parts[0].clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Need:
    """Something whose units the world size must divide.

    Attributes:
        repeatable: The world size may be a multiple of them, too: ranks hold the same one.
        least: It is enough that there is one for each rank.
        uneven: So it is where there is no other way to divide the module.
    """

    module: str
    what: str
    units: int
    repeatable: bool = False
    least: bool = False
    uneven: bool = False

    def fits(self, world_size: int) -> bool:
        """Whether ``world_size`` ranks can share it."""
        if self.least:
            return self.units >= world_size
        return self.units % world_size == 0 or (self.repeatable and world_size % self.units == 0)


@dataclass(frozen=True)
class WholeExperts:
    """Another way to divide a module of experts: each rank holds some of them, whole.

    Attributes:
        cuts: Parameter -> how it is divided.
        count: How many experts there are; each rank has at least one.
    """

    cuts: dict[str, Cut]
    count: int


def undivided(model: str) -> Plan:
    """The plan of ``model`` where every rank holds all of it."""
    return Plan(model, 1, {}, [], {}, {}, {}, {})


@dataclass
class Layout:
    """What of a model can be divided, whatever the world size.

    Attributes:
        model: Name of the model's class.
        cuts: Parameter -> how it is divided. What is not named is whole on every rank.
        once: Parameters that only rank 0 adds: biases of layers whose output is added over the ranks.
        roles: Module -> one of `ROLES`.
        counts: Module -> attribute -> (value, units): it counts units, or is a multiple of their number.
        groups: Module -> (attribute, heads, heads of keys and values), for how many of the former share one.
        needs: What the world size has to fit.
        whole: Module -> why it is not divided.
        pairs: Module that adds its output over the ranks -> one that leaves its own to it.
        experts: Module of experts, which ``cuts`` divides by channels -> the other way to divide it.
    """

    model: str
    cuts: dict[str, Cut] = field(default_factory=dict)
    once: list[str] = field(default_factory=list)
    roles: dict[str, str] = field(default_factory=dict)
    counts: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    groups: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    needs: list[Need] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)
    pairs: dict[str, str] = field(default_factory=dict)
    experts: dict[str, WholeExperts] = field(default_factory=dict)

    def violations(self, world_size: int) -> list[str]:
        """A sentence for each kind of thing that ``world_size`` ranks cannot share."""
        found: dict[tuple[str, int], list[str]] = {}
        for need in self.needs:
            if not need.fits(world_size) and not self._fits_otherwise(need, world_size):
                found.setdefault((need.what, need.units), []).append(need.module)
        return [
            f"{units} {what} of {modules[0]}" + (f" and {len(modules) - 1} more" if len(modules) > 1 else "")
            for (what, units), modules in found.items()
        ]

    def world_sizes(self) -> list[int]:
        """Those that fit, up to 64."""
        return [size for size in range(2, _MOST_RANKS + 1) if not self.violations(size)]

    def _fits_otherwise(self, need: Need, world_size: int) -> bool:
        is_enough = need.uneven and need.units >= world_size
        return is_enough or self._can_be_whole(need.module, world_size)

    def _can_be_whole(self, module: str, world_size: int) -> bool:
        return module in self.experts and self.experts[module].count >= world_size

    def _with_whole_experts(self, world_size: int, wanted: bool) -> Layout:
        """Experts whole where that is ``wanted`` and there are enough, and where channels do not fit."""
        narrow = {need.module for need in self.needs if not need.fits(world_size)}
        whole = [
            name
            for name in self.experts
            if (wanted or name in narrow) and self._can_be_whole(name, world_size)
        ]
        found = self
        for name in whole:
            prefix = f"{name}."
            found = replace(
                found,
                cuts={key: cut for key, cut in found.cuts.items() if not key.startswith(prefix)}
                | self.experts[name].cuts,
                once=[key for key in found.once if not key.startswith(prefix)],
                roles=found.roles | {name: EXPERTS},
                counts={key: counts for key, counts in found.counts.items() if key != name},
            )
        return found

    def plan(self, world_size: int, whole_experts: bool = False) -> Plan:
        """The plan for so many ranks.

        Args:
            whole_experts: Give each rank whole experts, not channels of all of them, where there are enough.

        Raises:
            PlanError: Something cannot be shared by so many, or nothing is divided at all; names everything
                that does not fit, and the world sizes that do.
        """
        if not self.cuts:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in list(self.whole.items())[:5])
            raise PlanError(
                f"{self.model} cannot be divided over {world_size} ranks: no part of it is recognised"
                + (f" ({reasons})" if reasons else "")
                + ". Without shard every process runs the whole model."
            )
        violations = self.violations(world_size)
        if violations:
            sizes = ", ".join(map(str, self.world_sizes())) or "none but 1"
            raise PlanError(
                f"{self.model} cannot be divided over {world_size} ranks, which do not divide "
                + ", ".join(violations)
                + f". World sizes that work: {sizes}. Start as many processes. "
                "Without shard every process runs the whole model."
            )
        found = self._with_whole_experts(world_size, whole_experts)
        attributes = found._attributes(world_size)
        return Plan(
            self.model, world_size, found.cuts, found.once, found.roles, attributes, self.whole, self.pairs
        )

    def _attributes(self, world_size: int) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for module, counts in self.counts.items():
            for name, (value, units) in counts.items():
                local = max(1, units // world_size)
                found.setdefault(module, {})[name] = value // units * local
        for module, (name, heads, kv_heads) in self.groups.items():
            local = heads // world_size // max(1, kv_heads // world_size)
            found.setdefault(module, {})[name] = local
        return found


@dataclass(frozen=True)
class Plan:
    """`Layout` for a world size.

    Attributes:
        attributes: Module -> attribute -> its value on a rank, such as the number of heads.
    """

    model: str
    world_size: int
    cuts: dict[str, Cut]
    once: list[str]
    roles: dict[str, str]
    attributes: dict[str, dict[str, int]]
    whole: dict[str, str]
    pairs: dict[str, str]

    def shape(self, name: str, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Of parameter ``name`` on ``rank``."""
        cut = self.cuts.get(name)
        if cut is None:
            return shape
        dim = cut.dim % len(shape)
        return (*shape[:dim], cut.length(rank, self.world_size), *shape[dim + 1 :])

    def collectives(self) -> Iterator[tuple[str, str]]:
        """(module, role) of each that exchanges something when it is called."""
        yield from self.roles.items()

    def digest(self) -> str:
        """Of all that the plan says, to compare it over the ranks."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The plan as JSON; `from_json` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """What `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        values["cuts"] = {
            name: Cut(cut["dim"], tuple(Part(**part) for part in cut["parts"]))
            for name, cut in values["cuts"].items()
        }
        return cls(**values)
