"""NPU pass: run Gemma's residual add and norm as one aclnnAddRmsNorm, with a precomputed 1 + weight."""

from __future__ import annotations

from dataclasses import replace

import torch

from .passes import Step, is_slot
from .recording import Call, Recording, Slot

aten, ours = torch.ops.aten, torch.ops.liteboost


def with_weights_plus_one(
    calls: list[Step], recording: Recording, shapes: dict[int, torch.Tensor]
) -> list[Step]:
    """``calls`` with ``1 + weight`` of the norms that add, made in one launch a step for all of them.

    No operator adds and norms by ``1 + weight``: AddRmsNorm takes a weight in the dtype of what is normed, so
    that ``1 + weight`` is rounded to it. Made in each step, because a weight may change between two.
    """
    norms = [call for call in calls if isinstance(call, Call) and _is_offset_sum(call, recording, shapes)]
    weights = {call.args[2].number: call.args[2] for call in norms}
    if len(norms) < 2:
        return calls
    made = {number: Slot(recording.new()) for number in weights}
    results = [made[number].number for number in weights]
    plus_one = Call(aten._foreach_add.Scalar, ([*weights.values()], 1.0), {}, results, is_list=True)
    plain = {id(norm): _plain(norm, made) for norm in norms}
    return [plus_one, *(plain.get(id(call), call) for call in calls)]


def _plain(norm: Call, made: dict[int, Slot]) -> Call:
    x, residual, weight, eps, _, *late = norm.args
    return replace(norm, args=(x, residual, made[weight.number], eps, 0.0, *late))


def _is_offset_sum(call: Call, recording: Recording, shapes: dict[int, torch.Tensor]) -> bool:
    """Whether it adds, and norms by one more than a parameter of the same dtype."""
    if call.function is not ours.add_rms_norm.default or call.kwargs or len(call.args) < 5:
        return False
    if call.args[4] != 1.0 or not all(map(is_slot, call.args[:3])):
        return False
    weight, x = recording.constants.get(call.args[2].number), shapes.get(call.args[0].number)
    is_npu = type(x) is torch.Tensor and x.device.type == "npu" and hasattr(ours, "_npu_soc")
    return weight is not None and is_npu and x is not None and weight.dim() == 1 and weight.dtype == x.dtype
