"""Weights of integers, divided: by the outputs of the matrix that they are kept as, or by its inputs.

Where ranks meet inside of a group of inputs, the group becomes smaller ones with the same scale. Experts lie
one below the other in their matrix, and are divided along their channels, or by whole experts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...config import QUANT_GROUPS as GROUP_SIZES
from ...ops.quantized_linear import TILE
from ...quantization.experts import Experts, QuantizedExperts
from ...quantization.layers import QuantizedLinear
from ...quantization.rounding import Quantized
from ...quantization.schemes import Scheme
from ...quantization.weights import QuantizedWeight
from .plan import Cut, Layout, Plan
from .shard_spec import Ranges, Share

if TYPE_CHECKING:
    from ...quantization.choices import Choice


@dataclass(frozen=True)
class Weight:
    """The weight of a linear layer or of experts, as integers.

    Attributes:
        form: What the parameter is that it stands for; of a linear layer one expert.
        is_experts: Whether that has a dimension for experts.
        keeps_order: Whether its columns are those of the input in order.
    """

    form: Experts
    scheme: Scheme
    is_experts: bool
    keeps_order: bool = True

    @classmethod
    def of(cls, module: QuantizedWeight) -> Weight:
        """Of what stands in a model."""
        if isinstance(module, QuantizedExperts):
            return cls(module.form, module.scheme, True)
        assert isinstance(module, QuantizedLinear)
        form = Experts(1, module.out_features, module.in_features, module.is_transposed)
        return cls(form, module.scheme, False, module.columns is None)

    def units(self) -> tuple[int, int]:
        """How many outputs, and how many inputs, no rank has a part of."""
        inputs = min(GROUP_SIZES) if self.scheme.bits == 4 and self.keeps_order else 1
        return (TILE if self.is_experts else 1), inputs

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of its buffers."""
        return self.scheme.shapes(self.form.count * self.form.outputs, self.form.inputs)

    def is_by_inputs(self, cut: Cut) -> bool:
        """Whether ``cut``, of the parameter, divides its inputs."""
        return cut.dim == int(self.is_experts) + (0 if self.form.is_transposed else 1)

    def group_size(self, cut: Cut, world_size: int) -> int:
        """Of the groups of each rank; 0 if there is none for it."""
        if self.scheme.bits == 8 or not self.is_by_inputs(cut):
            return self.scheme.group_size
        ends = {end for rank in range(world_size) for part in cut.ranges(rank, world_size) for end in part}
        sizes = (size for size in sorted(GROUP_SIZES, reverse=True) if size <= self.scheme.group_size)
        return next((size for size in sizes if not any(end % size for end in ends)), 0)

    def part(self, cut: Cut, rank: int, world_size: int) -> Weight:
        """What ``rank`` holds of it."""
        length = cut.length(rank, world_size)
        scheme = replace(self.scheme, group_size=self.group_size(cut, world_size))
        if self.is_by_inputs(cut):
            changed = {"inputs": length}
        else:
            changed = {"count" if self.is_experts and cut.dim == 0 else "outputs": length}
        return replace(self, form=replace(self.form, **changed), scheme=scheme)

    def shares(self, cut: Cut, world_size: int) -> dict[str, Share]:
        """How its buffers are divided; those that are not named are whole on every rank."""
        ranges = [tuple(cut.ranges(rank, world_size)) for rank in range(world_size)]
        names = [name for name in self.shapes() if name != "columns"]
        if not self.is_by_inputs(cut):
            rows = Share(0, self.form.count * self.form.outputs, tuple(map(self._rows_of(cut), ranges)))
            return dict.fromkeys(names, rows)
        if self.scheme.bits == 8:
            return {"weight": Share(1, self.form.inputs, tuple(ranges))}
        size = self.group_size(cut, world_size)
        found = {name: _every(size, self.form.inputs, ranges, self.scheme.group_size) for name in names}
        return found | {"weight": _every(2, self.form.inputs, ranges, 2)}  # two columns in a byte

    def _rows_of(self, cut: Cut) -> Any:
        """From ranges of a parameter to those of the matrix."""
        outputs = self.form.outputs
        if self.is_experts and cut.dim == 0:
            return lambda ranges: tuple((first * outputs, last * outputs) for first, last in ranges)
        return lambda ranges: tuple(
            (expert * outputs + first, expert * outputs + last)
            for expert in range(self.form.count)
            for first, last in ranges
        )


def _every(size: int, inputs: int, ranges: list[Ranges], of: int) -> Share:
    """Of what there is one of for ``of`` columns, and on a rank one for ``size`` of them."""
    own = tuple(tuple((first // size, last // size) for first, last in each) for each in ranges)
    return Share(1, inputs // size, own, of // size)


def modules_of(model: nn.Module) -> dict[str, QuantizedWeight]:
    """What keeps weights of ``model`` as integers, by name."""
    return {name: each for name, each in model.named_modules() if isinstance(each, QuantizedWeight)}


def parameter_of(name: str, module: QuantizedWeight) -> str:
    """The name of the parameter that a module stands for, or is beside."""
    return name if isinstance(module, QuantizedExperts) else f"{name}.weight"


def weights_of(model: nn.Module, awaited: dict[str, Choice] | None = None) -> dict[str, Weight]:
    """The weights of integers of ``model``, by the names of their parameters.

    Args:
        awaited: Experts that are parameters still and will be integers, by name.
    """
    found = {parameter_of(name, each): Weight.of(each) for name, each in modules_of(model).items()}
    for name, choice in (awaited or {}).items():
        assert choice.experts is not None and choice.scheme is not None
        found[name] = Weight(choice.experts, choice.scheme, True)
    return found


def units_of(weights: dict[str, Weight]) -> dict[str, tuple[int, int]]:
    """What `layout.of` is told of them."""
    return {name: weight.units() for name, weight in weights.items()}


@contextlib.contextmanager
def as_plain(model: nn.Module) -> Iterator[None]:
    """While it lasts, what is integers is floating point on the meta device, for who looks for that."""
    found = modules_of(model)
    for name, module in found.items():
        if isinstance(module, QuantizedExperts):
            owner, local = _owner(model, name)
            delattr(owner, local)
            weight = torch.empty(module.shape, dtype=module.dtype, device="meta")
            owner.register_parameter(local, nn.Parameter(weight, requires_grad=False))
        elif isinstance(module, QuantizedLinear):
            model.set_submodule(name, _plain(module))
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


def _plain(layer: QuantizedLinear) -> nn.Module:
    from transformers.pytorch_utils import Conv1D  # not before there is a model

    with torch.device("meta"):
        if layer.is_transposed:
            plain: nn.Module = Conv1D(layer.out_features, layer.in_features)
        else:
            plain = nn.Linear(layer.in_features, layer.out_features, bias=False)
    plain.weight = nn.Parameter(plain.weight.to(layer.dtype), requires_grad=False)
    plain.bias = layer.bias
    return plain


def why_not(weights: dict[str, Weight], plan: Plan) -> str:
    """Why ``plan`` cannot divide ``weights``, or an empty string."""
    if plan.world_size == 1:
        return ""
    for name, weight in weights.items():
        cut = plan.cuts.get(name)
        if cut is None or not weight.is_by_inputs(cut):
            continue
        if not weight.keeps_order:
            return (
                f"{name}, which is divided by its inputs, keeps its columns in another order (desc_act, or "
                "groups of more than 4 bits)"
            )
        if not weight.group_size(cut, plan.world_size):
            return f"{name} would be divided elsewhere than at a multiple of {min(GROUP_SIZES)} columns"
    return ""


def world_sizes(model: nn.Module, layout: Layout, whole_experts: bool = False) -> list[int]:
    """Numbers of ranks that can share ``model``, whose ``layout`` this is."""
    weights = weights_of(model)
    return [size for size in layout.world_sizes() if not why_not(weights, layout.plan(size, whole_experts))]


def cut(model: nn.Module, plan: Plan, rank: int) -> None:
    """Give what keeps integers of ``model`` the sizes of this rank, and its part of what is loaded."""
    for name, module in modules_of(model).items():
        how = plan.cuts.get(parameter_of(name, module))
        if how is None:
            continue
        weight, was_arranged = Weight.of(module), module.is_arranged
        held, shares = weight.part(how, rank, plan.world_size), weight.shares(how, plan.world_size)
        if was_arranged:
            module.lay_back()
        if module.weight.is_meta:
            for part, (shape, dtype) in held.shapes().items():
                setattr(module, part, torch.empty(shape, dtype=dtype, device="meta"))
        else:
            module.fill(part_of(module.saved(), shares, rank))
        _resize(module, held)
        note(module, shares)
        if was_arranged:
            module.arrange()


def note(module: nn.Module, shares: dict[str, Share]) -> None:
    """Keep on ``module`` how its buffers are divided, for `shares_of`."""
    vars(module)["shares"] = shares


def shares_of(model: nn.Module) -> dict[str, Share]:
    """How the buffers of ``model``, which is divided, are; by their names."""
    return {
        f"{name}.{part}": share
        for name, module in modules_of(model).items()
        for part, share in vars(module).get("shares", {}).items()
    }


def _resize(module: QuantizedWeight, held: Weight) -> None:
    module.scheme = held.scheme
    module.in_features, module.out_features = held.form.inputs, held.form.count * held.form.outputs
    if isinstance(module, QuantizedExperts):
        module.form = held.form


def part_of(kept: Quantized, shares: dict[str, Share], rank: int) -> Quantized:
    """What ``rank`` holds of a weight."""
    return Quantized(
        **{
            name: shares[name].held(tensor, rank) if name in shares else tensor
            for name, tensor in kept.tensors().items()
        }
    )


def nbytes(weight: Weight, how: Cut | None, rank: int, world_size: int) -> int:
    """Of the integers and the scales that ``rank`` holds of ``weight``."""
    held = weight if how is None else weight.part(how, rank, world_size)
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in held.shapes().values())
