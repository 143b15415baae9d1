"""The sharding plan: which shard of each parameter a rank holds, and which modules communicate.

Plain data. `layout.infer_layout` derives it from a model on the meta device, before any file is opened.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

from ...errors import PlanError
from .shard_spec import DimSharding, Segment, ShardSpec

#: Roles of modules that communicate. Their values are part of the file format.
Role = Literal["sum", "sum_output", "experts", "embedding", "head", "norm"]
ROWWISE: Final = "sum"  # a row-parallel linear layer: its output is all-reduced
ALL_REDUCE_OUTPUT: Final = "sum_output"  # any other module whose output is all-reduced
EXPERTS: Final = "experts"  # expert parallel: each rank has some experts, whose outputs are all-reduced
EMBEDDING: Final = "embedding"  # vocabulary parallel: the output is all-reduced
HEAD: Final = "head"  # vocabulary parallel: the logits are all-gathered
NORM: Final = "norm"  # an RMSNorm over all heads: the sums of squares are all-reduced
ROLES: tuple[Role, ...] = (ROWWISE, ALL_REDUCE_OUTPUT, EXPERTS, EMBEDDING, HEAD, NORM)
#: The largest world size that is tried when others are proposed.
_MAX_WORLD_SIZE = 64


@dataclass(frozen=True)
class Requirement:
    """Units that the world size must divide.

    Attributes:
        repeatable: The world size may also be a multiple of them: several ranks hold the same unit.
        least: One unit for each rank is enough.
        uneven: One unit for each rank is enough where the module cannot be sharded otherwise.
    """

    module: str
    what: str
    units: int
    repeatable: bool = False
    least: bool = False
    uneven: bool = False

    def fits(self, world_size: int) -> bool:
        """Whether the units can be sharded over ``world_size`` ranks."""
        if self.least:
            return self.units >= world_size
        return self.units % world_size == 0 or (self.repeatable and world_size % self.units == 0)


@dataclass(frozen=True)
class ExpertSharding:
    """Expert parallelism as the alternative for a module of experts: each rank holds some, whole.

    Attributes:
        shardings: Parameter -> how it is sharded.
        count: Number of experts; each rank holds at least one.
    """

    shardings: dict[str, DimSharding]
    count: int


def unsharded_plan(model: str) -> ShardingPlan:
    """The plan by which every rank holds all of ``model``."""
    return ShardingPlan(model, 1, {}, [], {}, {}, {}, {})


@dataclass
class Layout:
    """What of a model can be sharded, for any world size.

    Attributes:
        model: Name of the model's class.
        shardings: Parameter -> how it is sharded. Those that are not named are replicated.
        rank0_only: Parameters that only rank 0 adds: biases of layers whose output is all-reduced.
        roles: Module -> one of `ROLES`.
        counts: Module -> attribute -> (value, units): it counts units, or is a multiple of their number.
        kv_groups: Module -> (attribute, heads, KV heads): the number of heads that share a KV head.
        requirements: What the world size has to fit.
        replicated: Module -> why it is not sharded.
        deferred: Module whose output is all-reduced -> another whose output is reduced together with it.
        experts: Module of experts, which ``shardings`` shards by channels -> expert parallelism instead.
    """

    model: str
    shardings: dict[str, DimSharding] = field(default_factory=dict)
    rank0_only: list[str] = field(default_factory=list)
    roles: dict[str, Role] = field(default_factory=dict)
    counts: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    kv_groups: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    requirements: list[Requirement] = field(default_factory=list)
    replicated: dict[str, str] = field(default_factory=dict)
    deferred: dict[str, str] = field(default_factory=dict)
    experts: dict[str, ExpertSharding] = field(default_factory=dict)

    def violations(self, world_size: int) -> list[str]:
        """A sentence for each kind of thing that ``world_size`` ranks cannot share."""
        found: dict[tuple[str, int], list[str]] = {}
        for need in self.requirements:
            if not need.fits(world_size) and not self._fits_otherwise(need, world_size):
                found.setdefault((need.what, need.units), []).append(need.module)
        return [
            f"{units} {what} of {modules[0]}" + (f" and {len(modules) - 1} more" if len(modules) > 1 else "")
            for (what, units), modules in found.items()
        ]

    def world_sizes(self) -> list[int]:
        """Those that fit, up to 64."""
        return [size for size in range(2, _MAX_WORLD_SIZE + 1) if not self.violations(size)]

    def _fits_otherwise(self, requirement: Requirement, world_size: int) -> bool:
        is_enough = requirement.uneven and requirement.units >= world_size
        return is_enough or self._can_be_expert_parallel(requirement.module, world_size)

    def _can_be_expert_parallel(self, module: str, world_size: int) -> bool:
        return module in self.experts and self.experts[module].count >= world_size

    def _with_expert_parallel(self, world_size: int, wanted: bool) -> Layout:
        """Expert parallelism where it is ``wanted`` and there are enough experts, or channels do not fit."""
        unfit = {each.module for each in self.requirements if not each.fits(world_size)}
        modules = [
            name
            for name in self.experts
            if (wanted or name in unfit) and self._can_be_expert_parallel(name, world_size)
        ]
        found = self
        for name in modules:
            prefix = f"{name}."
            others = {
                key: sharding for key, sharding in found.shardings.items() if not key.startswith(prefix)
            }
            found = replace(
                found,
                shardings=others | self.experts[name].shardings,
                rank0_only=[key for key in found.rank0_only if not key.startswith(prefix)],
                roles=found.roles | {name: EXPERTS},
                counts={key: counts for key, counts in found.counts.items() if key != name},
            )
        return found

    def plan(self, world_size: int, expert_parallel: bool = False) -> ShardingPlan:
        """The plan for ``world_size`` ranks.

        Args:
            expert_parallel: Give each rank whole experts where there are enough, not channels of all of them.

        Raises:
            PlanError: The model does not fit the world size, or nothing can be sharded; names everything that
                does not fit, and the world sizes that do.
        """
        if not self.shardings:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in list(self.replicated.items())[:5])
            raise PlanError(
                f"{self.model} cannot be sharded over {world_size} ranks: no part of it is recognised"
                + (f" ({reasons})" if reasons else "")
                + ". Without shard every process runs the whole model."
            )
        violations = self.violations(world_size)
        if violations:
            sizes = ", ".join(map(str, self.world_sizes())) or "none but 1"
            raise PlanError(
                f"{self.model} cannot be sharded over {world_size} ranks, which do not divide "
                + ", ".join(violations)
                + f". World sizes that work: {sizes}. Start as many processes. "
                "Without shard every process runs the whole model."
            )
        found = self._with_expert_parallel(world_size, expert_parallel)
        return ShardingPlan(
            model=self.model,
            world_size=world_size,
            shardings=found.shardings,
            rank0_only=found.rank0_only,
            roles=found.roles,
            attributes=found._attributes(world_size),
            replicated=self.replicated,
            deferred=self.deferred,
        )

    def _attributes(self, world_size: int) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for module, counts in self.counts.items():
            for name, (value, units) in counts.items():
                local = max(1, units // world_size)
                found.setdefault(module, {})[name] = value // units * local
        for module, (name, heads, kv_heads) in self.kv_groups.items():
            local = heads // world_size // max(1, kv_heads // world_size)
            found.setdefault(module, {})[name] = local
        return found


#: Names of fields in JSON, where they are other ones: `ShardingPlan.digest` and files hold them.
_JSON_FIELDS = {
    "shardings": "cuts",
    "rank0_only": "once",
    "replicated": "whole",
    "deferred": "pairs",
}


@dataclass(frozen=True)
class ShardingPlan:
    """`Layout` for a world size.

    Attributes:
        attributes: Module -> attribute -> its value on a rank, such as the number of heads.
    """

    model: str
    world_size: int
    shardings: dict[str, DimSharding]
    rank0_only: list[str]
    roles: dict[str, Role]
    attributes: dict[str, dict[str, int]]
    replicated: dict[str, str]
    deferred: dict[str, str]

    def spec(self, name: str) -> ShardSpec:
        """How parameter ``name``, which is sharded, is."""
        return self.shardings[name].spec(self.world_size)

    def local_shape(self, name: str, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Shape of parameter ``name`` on ``rank``."""
        sharding = self.shardings.get(name)
        if sharding is None:
            return shape
        dim = sharding.dim % len(shape)
        return (*shape[:dim], sharding.length(rank, self.world_size), *shape[dim + 1 :])

    def digest(self) -> str:
        """Hash of the whole plan, to compare it over the ranks."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The plan as JSON; `from_json` reads it."""
        values = {_JSON_FIELDS.get(name, name): value for name, value in asdict(self).items()}
        values["cuts"] = {
            name: {"dim": sharding["dim"], "parts": sharding["segments"]}
            for name, sharding in values["cuts"].items()
        }
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> ShardingPlan:
        """What `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        fields = {name: values[_JSON_FIELDS.get(name, name)] for name in cls.__dataclass_fields__}
        fields["shardings"] = {
            name: DimSharding(each["dim"], tuple(Segment(**part) for part in each["parts"]))
            for name, each in fields["shardings"].items()
        }
        return cls(**fields)
