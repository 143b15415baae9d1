"""Quantized weights, sharded by the outputs or by the inputs of the matrix they are kept as.

Where a shard boundary lies within a quantization group, the group becomes smaller ones with the same scale.
Experts are stacked in one matrix, and are sharded by their channels, or as whole experts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...ops.quantized_linear import TILE
from ...quantization.layers import QuantizedExperts, QuantizedLayer, QuantizedLinear, WeightShape
from ...quantization.schemes import QuantizedTensor, QuantScheme
from ...setting_values import QUANT_GROUPS as GROUP_SIZES
from .plan import Layout, ShardingPlan
from .shard_spec import DimSharding, Ranges, ShardSpec

if TYPE_CHECKING:
    from ...quantization.layers.target import QuantTarget


@dataclass(frozen=True)
class Weight:
    """The quantized weight of a linear layer or of experts.

    Attributes:
        shape: Shape of the parameter it replaces; a linear layer is one expert.
        is_experts: Whether that parameter has a dimension of experts.
        keeps_order: Whether its columns are in the order of the inputs.
    """

    shape: WeightShape
    scheme: QuantScheme
    is_experts: bool
    keeps_order: bool = True

    @classmethod
    def of(cls, module: QuantizedLayer) -> Weight:
        """The weight of a module."""
        if isinstance(module, QuantizedExperts):
            return cls(module.weight_shape, module.scheme, True)
        assert isinstance(module, QuantizedLinear)
        shape = WeightShape(1, module.out_features, module.in_features, module.is_transposed)
        return cls(shape, module.scheme, False, module.columns is None)

    def granularity(self) -> tuple[int, int]:
        """Numbers of outputs and of inputs that stay on one rank."""
        inputs = min(GROUP_SIZES) if self.scheme.bits == 4 and self.keeps_order else 1
        return (TILE if self.is_experts else 1), inputs

    def buffer_specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of its buffers."""
        return self.scheme.buffer_specs(self.shape.rows, self.shape.in_features)

    def is_by_inputs(self, sharding: DimSharding) -> bool:
        """Whether ``sharding`` shards the inputs of the parameter."""
        return sharding.dim == int(self.is_experts) + (0 if self.shape.is_transposed else 1)

    def group_size(self, sharding: DimSharding, world_size: int) -> int:
        """Group size of each shard; 0 where none fits."""
        if self.scheme.bits == 8 or not self.is_by_inputs(sharding):
            return self.scheme.group_size
        ends = {
            end for rank in range(world_size) for part in sharding.ranges(rank, world_size) for end in part
        }
        sizes = (size for size in sorted(GROUP_SIZES, reverse=True) if size <= self.scheme.group_size)
        return next((size for size in sizes if not any(end % size for end in ends)), 0)

    def local(self, sharding: DimSharding, rank: int, world_size: int) -> Weight:
        """The shard of ``rank``."""
        length = sharding.length(rank, world_size)
        scheme = replace(self.scheme, group_size=self.group_size(sharding, world_size))
        if self.is_by_inputs(sharding):
            changed = {"in_features": length}
        else:
            changed = {"num_experts" if self.is_experts and sharding.dim == 0 else "out_features": length}
        return replace(self, shape=replace(self.shape, **changed), scheme=scheme)

    def specs(self, sharding: DimSharding, world_size: int) -> dict[str, ShardSpec]:
        """How its buffers are sharded; those that are not named are replicated."""
        ranges = [tuple(sharding.ranges(rank, world_size)) for rank in range(world_size)]
        names = [name for name in self.buffer_specs() if name != "columns"]
        if not self.is_by_inputs(sharding):
            rows = ShardSpec(0, self.shape.rows, tuple(map(self._rows_of(sharding), ranges)))
            return dict.fromkeys(names, rows)
        if self.scheme.bits == 8:
            return {"weight": ShardSpec(1, self.shape.in_features, tuple(ranges))}
        size = self.group_size(sharding, world_size)
        found = {
            name: _spec_of_groups(size, self.shape.in_features, ranges, self.scheme.group_size)
            for name in names
        }
        return found | {
            "weight": _spec_of_groups(2, self.shape.in_features, ranges, 2)
        }  # two columns in a byte

    def _rows_of(self, sharding: DimSharding) -> Any:
        """A function from ranges of the parameter to rows of the matrix."""
        outputs = self.shape.out_features
        if self.is_experts and sharding.dim == 0:
            return lambda ranges: tuple((first * outputs, last * outputs) for first, last in ranges)
        return lambda ranges: tuple(
            (expert * outputs + first, expert * outputs + last)
            for expert in range(self.shape.num_experts)
            for first, last in ranges
        )


def _spec_of_groups(size: int, inputs: int, ranges: list[Ranges], of: int) -> ShardSpec:
    """For a buffer with one element for ``of`` columns, and on a rank one for ``size`` of them."""
    own = tuple(tuple((first // size, last // size) for first, last in each) for each in ranges)
    return ShardSpec(1, inputs // size, own, of // size)


def modules_of(model: nn.Module) -> dict[str, QuantizedLayer]:
    """The modules of ``model`` that hold quantized weights, by name."""
    return {name: each for name, each in model.named_modules() if isinstance(each, QuantizedLayer)}


def parameter_of(name: str, module: QuantizedLayer) -> str:
    """The name of the parameter that a module replaces, or whose layer it is."""
    return name if isinstance(module, QuantizedExperts) else f"{name}.weight"


def weights_of(model: nn.Module, pending: dict[str, QuantTarget] | None = None) -> dict[str, Weight]:
    """The quantized weights of ``model``, by the names of their parameters.

    Args:
        pending: Experts that are still parameters and will be quantized, by name.
    """
    found = {parameter_of(name, each): Weight.of(each) for name, each in modules_of(model).items()}
    for name, target in (pending or {}).items():
        assert target.experts is not None and target.scheme is not None
        found[name] = Weight(target.experts, target.scheme, True)
    return found


def granularities_of(weights: dict[str, Weight]) -> dict[str, tuple[int, int]]:
    """What `layout.infer_layout` takes."""
    return {name: weight.granularity() for name, weight in weights.items()}


@contextlib.contextmanager
def as_plain(model: nn.Module) -> Iterator[None]:
    """Within the context, quantized weights are floating-point parameters on the meta device."""
    found = modules_of(model)
    for name, module in found.items():
        if isinstance(module, QuantizedExperts):
            owner, local = _owner(model, name)
            delattr(owner, local)
            weight = torch.empty(module.shape, dtype=module.dtype, device="meta")
            owner.register_parameter(local, nn.Parameter(weight, requires_grad=False))
        elif isinstance(module, QuantizedLinear):
            weight = torch.empty(module.out_features, module.in_features, dtype=module.dtype, device="meta")
            plain = module.with_weight(weight)
            plain.weight.requires_grad_(False)
            model.set_submodule(name, plain)
    try:
        yield
    finally:
        for name, module in found.items():
            owner, local = _owner(model, name)
            if local in owner._parameters:
                delattr(owner, local)
            setattr(owner, local, module)  # a module in the place of another one keeps its place


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    parent, _, local = name.rpartition(".")
    return model.get_submodule(parent), local


def why_not(weights: dict[str, Weight], plan: ShardingPlan) -> str:
    """Why ``plan`` cannot shard ``weights``, or an empty string."""
    if plan.world_size == 1:
        return ""
    for name, weight in weights.items():
        sharding = plan.shardings.get(name)
        if sharding is None or not weight.is_by_inputs(sharding):
            continue
        if not weight.keeps_order:
            return (
                f"{name}, which is sharded by its inputs, keeps its columns in another order (desc_act, or "
                "groups of more than 4 bits)"
            )
        if not weight.group_size(sharding, plan.world_size):
            return f"{name} would be sharded elsewhere than at a multiple of {min(GROUP_SIZES)} columns"
    return ""


def world_sizes(model: nn.Module, layout: Layout, expert_parallel: bool = False) -> list[int]:
    """World sizes over which ``model``, whose ``layout`` this is, can be sharded."""
    weights = weights_of(model)
    return [size for size in layout.world_sizes() if not why_not(weights, layout.plan(size, expert_parallel))]


def shard_weights(model: nn.Module, plan: ShardingPlan, rank: int) -> None:
    """Keep this rank's shards of the quantized weights of ``model``, with their sizes."""
    for name, module in modules_of(model).items():
        sharding = plan.shardings.get(parameter_of(name, module))
        if sharding is None:
            continue
        weight, was_packed = Weight.of(module), module.is_packed
        shard, specs = weight.local(sharding, rank, plan.world_size), weight.specs(sharding, plan.world_size)
        if was_packed:
            module.unpack()
        if module.weight.is_meta:
            for part, (shape, dtype) in shard.buffer_specs().items():
                setattr(module, part, torch.empty(shape, dtype=dtype, device="meta"))
        else:
            module.fill(local_shard(module.unpacked(), specs, rank))
        _resize(module, shard)
        record_specs(module, specs)
        if was_packed:
            module.prepack()


def record_specs(module: nn.Module, specs: dict[str, ShardSpec]) -> None:
    """Record on ``module`` how its buffers are sharded, for `shard_specs_of`."""
    vars(module)["specs"] = specs


def shard_specs_of(model: nn.Module) -> dict[str, ShardSpec]:
    """How the buffers of a sharded ``model`` are sharded, by their names."""
    return {
        f"{name}.{part}": spec
        for name, module in modules_of(model).items()
        for part, spec in vars(module).get("specs", {}).items()
    }


def _resize(module: QuantizedLayer, shard: Weight) -> None:
    module.scheme = shard.scheme
    module.in_features, module.out_features = shard.shape.in_features, shard.shape.rows
    if isinstance(module, QuantizedExperts):
        module.weight_shape = shard.shape


def local_shard(whole: QuantizedTensor, specs: dict[str, ShardSpec], rank: int) -> QuantizedTensor:
    """The shard of a weight that ``rank`` holds."""
    return QuantizedTensor(
        **{
            name: specs[name].local(tensor, rank) if name in specs else tensor
            for name, tensor in whole.tensors().items()
        }
    )


def nbytes(weight: Weight, sharding: DimSharding | None, rank: int, world_size: int) -> int:
    """Bytes of the shard of ``weight`` that ``rank`` holds, scales included."""
    shard = weight if sharding is None else weight.local(sharding, rank, world_size)
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shard.buffer_specs().values())
