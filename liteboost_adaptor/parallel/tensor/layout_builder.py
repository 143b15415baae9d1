"""Builds a `Layout`: shardings by module, and the sizes of layers of any kind."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ...huggingface.class_code import is_product
from .plan import ROWWISE, DimSharding, ExpertSharding, Layout, Requirement, Role, Segment


def is_linear(module: nn.Module | None) -> bool:
    """Whether it is ``nn.Linear`` itself, a class with the same forward, or GPT-2's ``Conv1D``."""
    return type(module) is nn.Linear or is_transposed(module) or is_product(type(module))


def is_transposed(module: nn.Module | None) -> bool:
    """Whether it is transformers' ``Conv1D``: ``weight`` is ``[in_features, out_features]``."""
    cls = type(module)
    return (cls.__module__, cls.__name__) == ("transformers.pytorch_utils", "Conv1D")


class LayoutBuilder:
    """Collects a `Layout` for one model.

    Attributes:
        modules: Name -> module; a module with several names has its first.
        styles: The model's own ``tp_plan``, by full names.
        done: Names of the modules that are decided.
    """

    def __init__(
        self,
        model: nn.Module,
        styles: dict[str, str],
        granularities: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self.model = model
        self._granularities = granularities or {}
        self.modules = dict(model.named_modules())
        self.styles = styles
        self.done: set[str] = set()
        self._layout = Layout(type(model).__name__)

    def granularity(self, name: str) -> tuple[int, int]:
        """Numbers of outputs and of inputs of a weight that stay on one rank."""
        return self._granularities.get(name, (1, 1))

    def child(self, name: str, child: str) -> str | None:
        """Full name of a child (``../`` leads to the parent), or None."""
        while child.startswith("../"):
            name, child = name.rpartition(".")[0], child[3:]
        full = f"{name}.{child}" if name else child
        return full if full in self.modules else None

    def outputs(self, layer: nn.Module) -> int:
        """``out_features`` of a linear layer."""
        return layer.weight.shape[1 if is_transposed(layer) else 0]

    def inputs(self, layer: nn.Module) -> int:
        """``in_features`` of a linear layer."""
        return layer.weight.shape[0 if is_transposed(layer) else 1]

    def shard_outputs(self, name: str, pieces: tuple[Segment, ...]) -> None:
        """Shard a linear layer by its outputs (colwise)."""
        layer = self.modules[name]
        self.shard(f"{name}.weight", DimSharding(1 if is_transposed(layer) else 0, pieces))
        if layer.bias is not None:
            self.shard(f"{name}.bias", DimSharding(0, pieces))
        self.done.add(name)

    def shard_inputs(self, name: str, pieces: tuple[Segment, ...]) -> None:
        """Shard a linear layer by its inputs (rowwise); rank 0 adds the bias."""
        layer = self.modules[name]
        self.shard(f"{name}.weight", DimSharding(0 if is_transposed(layer) else 1, pieces))
        if layer.bias is not None:
            self.rank0_only(f"{name}.bias")
        self.done.add(name)

    def shard(self, name: str, sharding: DimSharding) -> None:
        """Shard a parameter."""
        self._layout.shardings[name] = sharding

    def rank0_only(self, name: str) -> None:
        """Let only rank 0 add a parameter."""
        self._layout.rank0_only.append(name)

    def set_role(self, name: str, role: Role) -> None:
        """Let a module communicate, as one of `ROLES`."""
        self._layout.roles[name] = role
        self.done.add(name)

    def row_parallel_below(self, name: str) -> list[str]:
        """Row-parallel layers in ``name``, in the order of the model."""
        prefix = f"{name}." if name else ""
        return [
            full for full, role in self._layout.roles.items() if role == ROWWISE and full.startswith(prefix)
        ]

    def defer_all_reduce(self, later: str, earlier: str) -> None:
        """Reduce the output of ``earlier`` with that of ``later``; they are only ever added."""
        del self._layout.roles[earlier]
        self._layout.deferred[later] = earlier

    def record_count(self, name: str, attribute: str, value: int, units: int) -> None:
        """Record an attribute that counts ``units``, each of which stands for ``value / units``."""
        self._layout.counts.setdefault(name, {})[attribute] = (value, units)

    def record_kv_groups(self, name: str, attribute: str, heads: int, kv_heads: int) -> None:
        """Record an attribute that says how many heads share a KV head."""
        self._layout.kv_groups[name] = (attribute, heads, kv_heads)

    def require(self, name: str, what: str, units: int, **how: bool) -> None:
        """Record what the world size has to divide; ``how``: other fields of `Requirement`."""
        self._layout.requirements.append(Requirement(name, what, units, **how))

    def replicate(self, name: str, reason: str) -> None:
        """Record why a module is not sharded."""
        self._layout.replicated[name] = reason

    def record_experts(self, name: str, shardings: dict[str, DimSharding], count: int) -> None:
        """Record that a module of ``count`` experts can be expert parallel."""
        self._layout.experts[name] = ExpertSharding(shardings, count)

    def skip(self, module: nn.Module) -> None:
        """Replicate a module without a reason of its own."""
        self.done.update(name for name, found in self.modules.items() if found is module)

    def finish(self) -> Layout:
        """The layout, with all names of tied parameters."""
        names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        for same in names.values():
            sharding = next(
                (self._layout.shardings[name] for name in same if name in self._layout.shardings), None
            )
            if sharding is not None:
                self._layout.shardings.update(dict.fromkeys(same, sharding))
            if any(name in self._layout.rank0_only for name in same):
                self._layout.rank0_only += [name for name in same if name not in self._layout.rank0_only]
        return self._layout
