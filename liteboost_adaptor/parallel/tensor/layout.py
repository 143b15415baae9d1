"""What of a model can be divided: by the model's own ``tp_plan`` where it has one, else by its structure.

Works on a model on the meta device. What is not understood stays whole on every rank, which is never wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from . import attention, parallel_branches, source_checks, vocabulary
from .layout_builder import Parts, is_linear
from .module_names import EXPERT_SIZES, FEED_FORWARD, FeedForward
from .plan import SUM, SUM_OUTPUT, Cut, Layout, Part


def of(model: nn.Module, units: Mapping[str, tuple[int, int]] | None = None) -> Layout:
    """The layout of ``model``: a transformers model, on any device.

    Args:
        units: Of weights that are integers, by their names: how many outputs, and how many inputs, stay
            together.
    """
    parts = Parts(model, own_styles(model), units)
    for name, module in parts.modules.items():
        if name in parts.done:
            continue
        if _is_experts(module):
            _experts(parts, name, module)
        else:
            attention.recognise(parts, name, module)
            _feed_forwards(parts, name, module)
    parallel_branches.recognise(parts)
    vocabulary.recognise(parts, model)
    return parts.finish()


def own_styles(model: nn.Module) -> dict[str, str]:
    """The model's own plan: module or parameter -> style; empty where it has none."""
    plan = getattr(model, "tp_plan", None)
    expand = getattr(model, "_expand_parallel_plan", None)
    return expand(dict(plan)) if plan and expand else {}


def _feed_forwards(parts: Parts, name: str, module: nn.Module) -> None:
    for form in FEED_FORWARD:
        layers = [parts.child(name, child) for child in (*form.wide, form.narrow)]
        if any(layer is None or layer in parts.done for layer in layers):
            continue
        reason = _why_whole(parts, name, module, form)
        if reason:
            parts.whole(name, reason)
        else:
            _divide_feed_forward(parts, name, form)
        return


def _why_whole(parts: Parts, name: str, module: nn.Module, form: FeedForward) -> str:
    wide = [parts.modules[parts.child(name, child)] for child in form.wide]
    narrow_name = parts.child(name, form.narrow)
    narrow = parts.modules[narrow_name]
    if not all(is_linear(layer) for layer in (*wide, narrow)):
        return (
            f"its layers are of type {', '.join(sorted({type(layer).__name__ for layer in (*wide, narrow)}))}"
        )
    width = parts.inputs(narrow)
    outputs = {parts.outputs(layer) for layer in wide}
    if outputs != {2 * width if form.halves else width}:
        return f"{', '.join(form.wide)} and {form.narrow} do not fit together"
    # Also where the model's own plan divides it: some plans overlook what looks at all channels (Gemma 3n).
    return source_checks.why_not_by_channel(module, form.wide, form.narrow)


def _divide_feed_forward(parts: Parts, name: str, form: FeedForward) -> None:
    narrow = parts.child(name, form.narrow)
    width = parts.inputs(parts.modules[narrow])
    unit = parts.unit(f"{narrow}.weight")[1]
    channels = Part(width, width // unit) if width % unit == 0 else Part(width, width)
    for child in form.wide:
        parts.cut_outputs(parts.child(name, child), (channels,) * (2 if form.halves else 1))
    parts.cut_inputs(narrow, (channels,))
    parts.role(narrow, SUM)
    parts.need(name, _of_units("channels", channels), channels.units, least=True)


def _of_units(what: str, part: Part) -> str:
    """What errors call the units of ``part``."""
    width = part.size // part.units
    return what if width == 1 else f"runs of {width} {what}"


def _is_experts(module: nn.Module) -> bool:
    return all(hasattr(module, flag) for flag in ("has_gate", "has_bias", "is_transposed", "is_concatenated"))


def _experts(parts: Parts, name: str, module: Any) -> None:
    """Experts kept as 3-D tensors, each divided like an MLP."""
    up = "gate_up_proj" if module.has_gate else "up_proj"
    first, second = getattr(module, up, None), getattr(module, "down_proj", None)
    if not (
        isinstance(first, torch.Tensor)
        and isinstance(second, torch.Tensor)
        and first.ndim == second.ndim == 3
    ):
        return parts.whole(name, "experts of a form that is not known")
    if getattr(module, "has_post_expert_norm", False):
        return parts.whole(name, "a norm behind each expert")
    reason = source_checks.why_gate_not_by_channel(module)
    if reason:
        return parts.whole(name, reason)
    rows, columns = (2, 1) if module.is_transposed else (1, 2)
    width = second.shape[columns]
    factor = 2 if module.has_gate else 1
    if first.shape[rows] != factor * width:
        return parts.whole(name, f"{up} and down_proj do not fit together")
    unit = math.lcm(
        math.lcm(parts.unit(f"{name}.{up}")[0], factor) // factor, parts.unit(f"{name}.down_proj")[1]
    )
    channels = Part(width, width // unit) if width % unit == 0 else Part(width, width)
    if module.has_gate and module.is_concatenated:
        pieces: tuple[Part, ...] = (channels, channels)
    else:
        pieces = (Part(factor * width, channels.units),)
    parts.cut(f"{name}.{up}", Cut(rows, pieces))
    parts.cut(f"{name}.down_proj", Cut(columns, (channels,)))
    if module.has_bias:
        parts.cut(f"{name}.{up}_bias", Cut(1, pieces))
        parts.once(f"{name}.down_proj_bias")
    sizes = [size for size in EXPERT_SIZES if vars(module).get(size) == width]
    is_read = source_checks.reads(module, sizes)  # one number for all ranks
    for size in sizes:
        parts.count(name, size, width, channels.units)
    what = _of_units("channels of experts", channels)
    parts.need(name, what, channels.units, uneven=not is_read)
    parts.role(name, SUM_OUTPUT)
    if source_checks.stands_other_experts(module) and getattr(module, "num_experts", 0) == first.shape[0]:
        count = first.shape[0]
        own = (
            f"{name}.{local}" for local, parameter in module.named_parameters() if parameter.shape[0] == count
        )
        parts.experts(name, {full: Cut(0, (Part(count, count),)) for full in own}, count)
    return None


def parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every name of every parameter: one that is tied has several."""
    return model.named_parameters(remove_duplicate=False)
