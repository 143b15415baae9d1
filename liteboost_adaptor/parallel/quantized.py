"""Layers of integers, divided as they are loaded: rows of the weight, or groups of its columns.

Where ranks meet inside of a group, the group becomes smaller ones with the same scale.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.files import Made, Slice
from ..config import QUANT_GROUPS as GROUP_SIZES
from ..ops.quantized_linear import pack_w4, unpack_w4
from ..quantization.layers import QuantizedLinear
from ..quantization.names import QUANT_METHOD
from ..quantization.naming import owners
from ..quantization.schemes import Scheme
from . import sources
from .plan import Cut, Plan

Ranges = tuple[tuple[int, int], ...]


def layers_of(model: nn.Module) -> dict[str, QuantizedLinear]:
    """The layers of integers of ``model``, by name."""
    return {name: each for name, each in model.named_modules() if isinstance(each, QuantizedLinear)}


@contextlib.contextmanager
def as_linear(model: nn.Module) -> Iterator[None]:
    """While it lasts, layers of integers are linear layers on the meta device, for who looks for those."""
    from transformers.pytorch_utils import Conv1D  # not before there is a model

    found = layers_of(model)
    for name, layer in found.items():
        with torch.device("meta"):
            if layer.is_transposed:
                plain: nn.Module = Conv1D(layer.out_features, layer.in_features)
            else:
                plain = nn.Linear(layer.in_features, layer.out_features, bias=False)
        plain.bias = layer.bias
        model.set_submodule(name, plain)
    try:
        yield
    finally:
        for name, layer in found.items():
            model.set_submodule(name, layer)


def why_not_read(quantizer: Any) -> str:
    """Why what ``quantizer`` loads is not read in parts, or an empty string."""
    if quantizer.quantization_config.quant_method != QUANT_METHOD:
        return "its weights are quantised by another library"
    if not quantizer.pre_quantized:
        return "its weights are quantised as they are read; quantise the checkpoint first"
    return ""


def why_not(model: nn.Module, plan: Plan) -> str:
    """Why ``plan`` cannot divide the layers of integers of ``model``, or an empty string."""
    for name, layer in layers_of(model).items():
        cut = plan.cuts.get(f"{name}.weight")
        if cut is not None and layer.is_transposed:
            return f"{name} stands for a layer that keeps its weight transposed"
        if cut is None or cut.dim == 0:
            continue
        if layer.columns is not None:
            return f"{name}, which is divided by its inputs, keeps its columns in another order (desc_act)"
        if not _group_size(layer.scheme, cut, plan.world_size):
            return f"{name} would be divided elsewhere than at a multiple of {min(GROUP_SIZES)} columns"
    return ""


def _group_size(scheme: Scheme, cut: Cut, world_size: int) -> int:
    """Of the groups of each rank; 0 if there is none for it."""
    if scheme.bits == 8 or cut.dim == 0:
        return scheme.group_size
    ends = {end for rank in range(world_size) for part in cut.ranges(rank, world_size) for end in part}
    sizes = (size for size in sorted(GROUP_SIZES, reverse=True) if size <= scheme.group_size)
    return next((size for size in sizes if not any(end % size for end in ends)), 0)


def tensors_of(
    model: nn.Module,
    tensors: Mapping[str, Slice | Made],
    plan: Plan,
    rank: int,
    weight_mapping: Any,
) -> tuple[dict[str, Any], list[Any]]:
    """What is read of each of ``tensors``, and the converters whose results are divided late."""
    layers = layers_of(model)
    shapes = {name: tuple(tensor.get_shape()) for name, tensor in tensors.items()}
    with as_linear(model):
        names = [name.removesuffix(".scales") for name in tensors if name.endswith(".scales")]
        of = {name: owner for name, owner in owners(model, names, weight_mapping).items() if owner in layers}
        for name, owner in of.items():
            sizes = (layers[owner].out_features, layers[owner].in_features)
            shapes[f"{name}.weight"] = sizes[::-1] if layers[owner].is_transposed else sizes
        found = sources.of(model, shapes, plan, weight_mapping)
    made: dict[str, Any] = {}
    for name, tensor in tensors.items():
        prefix, _, part = name.rpartition(".")
        source = found.parts.get(f"{prefix}.weight" if prefix in of and part != "bias" else name)
        if source is None:
            made[name] = tensor
        elif source.is_left_out(rank, plan.world_size):
            continue
        elif prefix in of and part != "bias":
            scheme = layers[of[prefix]].scheme
            size = _group_size(scheme, source.cut, plan.world_size)
            ranges = source.ranges(rank, plan.world_size)
            made[name] = _part(tensor, part, scheme, size, source.dim, ranges)
        else:
            made[name] = Slice(tensor.file, tensor.name, source.dim, source.ranges(rank, plan.world_size))
    return made, found.late


def cut(model: nn.Module, plan: Plan, rank: int) -> None:
    """Give the layers of integers of ``model``, which is on the meta device, the sizes of this rank."""
    for name, layer in layers_of(model).items():
        how = plan.cuts.get(f"{name}.weight")
        if how is None:
            continue
        length = how.length(rank, plan.world_size)
        if how.dim == 0:
            layer.out_features = length
        else:
            layer.in_features = length
            layer.scheme = replace(layer.scheme, group_size=_group_size(layer.scheme, how, plan.world_size))
        shapes = layer.scheme.shapes(layer.out_features, layer.in_features)
        for part, (shape, dtype) in shapes.items():
            setattr(layer, part, torch.empty(shape, dtype=dtype, device="meta"))


def _part(
    tensor: Slice | Made, part: str, scheme: Scheme, group_size: int, dim: int, ranges: Ranges
) -> Slice | Made:
    """Of one buffer of a layer, what belongs to ``ranges`` of its outputs (``dim`` 0) or inputs."""
    if part == "columns" or (dim and scheme.bits == 8 and part == "scales"):
        return tensor
    is_packed = part == "weight" and scheme.bits == 4
    repeats = 1
    if dim and part != "weight":
        ranges = tuple((first // group_size, last // group_size) for first, last in ranges)
        repeats = scheme.group_size // group_size
    shape = list(tensor.get_shape())
    length = sum(last - first for first, last in ranges)
    shape[dim] = length // 2 if is_packed and dim else length

    def make() -> Tensor:
        whole = unpack_w4(tensor[...]) if is_packed else tensor[...]
        whole = whole if repeats == 1 else whole.repeat_interleave(repeats, dim=1)
        held = torch.cat([whole.narrow(dim, first, last - first) for first, last in ranges], dim=dim)
        return pack_w4(held) if is_packed else held

    return Made(tuple(shape), _dtype(tensor), make)


def _dtype(tensor: Slice | Made) -> torch.dtype:
    return tensor.dtype if isinstance(tensor, Made) else tensor.file.entries[tensor.name].dtype
