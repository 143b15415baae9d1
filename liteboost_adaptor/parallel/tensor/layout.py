"""What of a model can be sharded, by its own ``tp_plan`` where it has one, else by its structure.

Works on a model on the meta device. What is not recognized is replicated, which is always correct.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from . import attention, parallel_branches, source_checks, vocabulary
from .layout_builder import LayoutBuilder, is_linear
from .module_names import EXPERT_SIZES, FEED_FORWARD, FeedForward
from .plan import ALL_REDUCE_OUTPUT, ROWWISE, DimSharding, Layout, Segment


def infer_layout(model: nn.Module, granularities: Mapping[str, tuple[int, int]] | None = None) -> Layout:
    """The layout of ``model``: a transformers model, on any device.

    Args:
        granularities: Of quantized weights, by their names: numbers of outputs and inputs that stay on one
            rank.
    """
    builder = LayoutBuilder(model, own_styles(model), granularities)
    for name, module in builder.modules.items():
        if name in builder.done:
            continue
        if _is_experts(module):
            _shard_experts(builder, name, module)
        else:
            attention.shard_attention(builder, name, module)
            _shard_feed_forwards(builder, name, module)
    parallel_branches.pair_branches(builder)
    vocabulary.shard_vocabulary(builder, model)
    return builder.finish()


def own_styles(model: nn.Module) -> dict[str, str]:
    """The model's own ``tp_plan``: module or parameter -> style; empty where it has none."""
    plan = getattr(model, "tp_plan", None)
    expand = getattr(model, "_expand_parallel_plan", None)
    return expand(dict(plan)) if plan and expand else {}


def _shard_feed_forwards(builder: LayoutBuilder, name: str, module: nn.Module) -> None:
    for form in FEED_FORWARD:
        layers = [builder.child(name, child) for child in (*form.wide, form.narrow)]
        if any(layer is None or layer in builder.done for layer in layers):
            continue
        reason = _why_unsharded(builder, name, module, form)
        if reason:
            builder.replicate(name, reason)
        else:
            _shard_feed_forward(builder, name, form)
        return


def _why_unsharded(builder: LayoutBuilder, name: str, module: nn.Module, form: FeedForward) -> str:
    wide = [builder.modules[builder.child(name, child)] for child in form.wide]
    narrow_name = builder.child(name, form.narrow)
    narrow = builder.modules[narrow_name]
    if not all(is_linear(layer) for layer in (*wide, narrow)):
        return (
            f"its layers are of type {', '.join(sorted({type(layer).__name__ for layer in (*wide, narrow)}))}"
        )
    width = builder.inputs(narrow)
    outputs = {builder.outputs(layer) for layer in wide}
    if outputs != {2 * width if form.halves else width}:
        return f"{', '.join(form.wide)} and {form.narrow} do not fit together"
    # Also where the model's own plan shards it: some overlook code over all channels (Gemma 3n).
    return source_checks.why_not_channelwise(module, form.wide, form.narrow)


def _shard_feed_forward(builder: LayoutBuilder, name: str, form: FeedForward) -> None:
    narrow = builder.child(name, form.narrow)
    width = builder.inputs(builder.modules[narrow])
    granularity = builder.granularity(f"{narrow}.weight")[1]
    channels = Segment(width, width // granularity) if width % granularity == 0 else Segment(width, width)
    for child in form.wide:
        builder.shard_outputs(builder.child(name, child), (channels,) * (2 if form.halves else 1))
    builder.shard_inputs(narrow, (channels,))
    builder.set_role(narrow, ROWWISE)
    builder.require(name, _of_units("channels", channels), channels.units, least=True)


def _of_units(what: str, segment: Segment) -> str:
    """What errors call the units of ``segment``."""
    width = segment.size // segment.units
    return what if width == 1 else f"runs of {width} {what}"


def _is_experts(module: nn.Module) -> bool:
    return all(hasattr(module, flag) for flag in ("has_gate", "has_bias", "is_transposed", "is_concatenated"))


def _shard_experts(builder: LayoutBuilder, name: str, module: Any) -> None:
    """Experts stored as 3-D tensors, each sharded like an MLP."""
    up = "gate_up_proj" if module.has_gate else "up_proj"
    first, second = getattr(module, up, None), getattr(module, "down_proj", None)
    if not (
        isinstance(first, torch.Tensor)
        and isinstance(second, torch.Tensor)
        and first.ndim == second.ndim == 3
    ):
        return builder.replicate(name, "experts of a form that is not known")
    if getattr(module, "has_post_expert_norm", False):
        return builder.replicate(name, "a norm behind each expert")
    reason = source_checks.why_gate_not_channelwise(module)
    if reason:
        return builder.replicate(name, reason)
    rows, columns = (2, 1) if module.is_transposed else (1, 2)
    width = second.shape[columns]
    factor = 2 if module.has_gate else 1
    if first.shape[rows] != factor * width:
        return builder.replicate(name, f"{up} and down_proj do not fit together")
    granularity = math.lcm(
        math.lcm(builder.granularity(f"{name}.{up}")[0], factor) // factor,
        builder.granularity(f"{name}.down_proj")[1],
    )
    channels = Segment(width, width // granularity) if width % granularity == 0 else Segment(width, width)
    if module.has_gate and module.is_concatenated:
        pieces: tuple[Segment, ...] = (channels, channels)
    else:
        pieces = (Segment(factor * width, channels.units),)
    builder.shard(f"{name}.{up}", DimSharding(rows, pieces))
    builder.shard(f"{name}.down_proj", DimSharding(columns, (channels,)))
    if module.has_bias:
        builder.shard(f"{name}.{up}_bias", DimSharding(1, pieces))
        builder.rank0_only(f"{name}.down_proj_bias")
    sizes = [size for size in EXPERT_SIZES if vars(module).get(size) == width]
    is_read = source_checks.reads(module, sizes)  # one value for all ranks
    for size in sizes:
        builder.record_count(name, size, width, channels.units)
    what = _of_units("channels of experts", channels)
    builder.require(name, what, channels.units, uneven=not is_read)
    builder.set_role(name, ALL_REDUCE_OUTPUT)
    if source_checks.supports_expert_parallel(module) and getattr(module, "num_experts", 0) == first.shape[0]:
        count = first.shape[0]
        own = (
            f"{name}.{local}" for local, parameter in module.named_parameters() if parameter.shape[0] == count
        )
        builder.record_experts(name, {full: DimSharding(0, (Segment(count, count),)) for full in own}, count)
    return None
