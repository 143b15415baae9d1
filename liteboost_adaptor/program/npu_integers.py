"""Activations of 8 bits in a recording on an NPU: rounded once for all who read them, or in their norm."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .passes import Step, is_slot, slots_read
from .recording import Call, Recording, Slot

ours = torch.ops.liteboost


def with_rows_of_integers(
    calls: list[Step], recording: Recording, shapes: dict[int, torch.Tensor], returned: Iterable[int]
) -> list[Step]:
    """``calls`` with fewer roundings before ``linear_w8a8``: one where several layers have one input.

    None where that is the result of ``add_rms_norm`` and nobody else reads it: one operator adds, norms and
    rounds, which rounds to integers what the others would have rounded to the dtype before.
    """
    groups = _groups(calls, shapes)
    if not groups:
        return calls
    kept = {*returned, *recording.aliases, *recording.aliases.values()}
    readers: dict[int, list[Step]] = {}
    for call in calls:
        for slot in slots_read(call):
            readers.setdefault(slot, []).append(call)
    norms: dict[int, list[Call]] = {}
    for call in calls:
        if isinstance(call, Call) and call.function is ours.add_rms_norm.default:
            group = groups.get(call.results[0], [])
            is_all = len(group) == len(readers.get(call.results[0], []))
            if group and is_all and call.results[0] not in kept and _is_rounded_at_once(call, shapes):
                norms[id(call)] = group
    return list(_rewritten(calls, recording, shapes, groups, norms))


def _groups(calls: list[Step], shapes: dict[int, torch.Tensor]) -> dict[int, list[Call]]:
    """Slot -> the layers of 8 bits that read it, all of which see the same values."""
    groups: dict[int, list[Call]] = {}
    closed: set[int] = set()
    for call in calls:
        if not isinstance(call, Call):
            continue
        if call.function._schema.is_mutable:
            closed |= set(groups)  # what is rounded may be another behind it
        elif call.function is ours.linear_w8a8.default and is_slot(call.args[0]) and not call.kwargs:
            x = call.args[0].number
            if x not in closed and _is_served(shapes.get(x)):
                groups.setdefault(x, []).append(call)
    return groups


def _is_served(x: torch.Tensor | None) -> bool:
    refusal = getattr(ours, "_npu_norm_int8_refusal", None)
    return type(x) is torch.Tensor and x.device.type == "npu" and refusal is not None and not refusal(x)


def _rewritten(
    calls: list[Step],
    recording: Recording,
    shapes: dict[int, torch.Tensor],
    groups: dict[int, list[Call]],
    norms: dict[int, list[Call]],
) -> Iterator[Step]:
    rounded: dict[int, tuple[Slot, Slot]] = {}
    member = {id(call): x for x, group in groups.items() for call in group}
    for call in calls:
        if not isinstance(call, Call):
            yield call
            continue
        if id(call) in norms:
            x = call.results[0]
            rounded[x] = integers, scales = Slot(recording.new()), Slot(recording.new())
            results = [integers.number, scales.number, call.results[1]]
            yield Call(ours._npu_add_rms_norm_int8.default, call.args[:4], {}, results)
            continue
        x = member.get(id(call), -1)
        if x not in rounded and len(groups.get(x, ())) > 1:
            rounded[x] = integers, scales = Slot(recording.new()), Slot(recording.new())
            yield Call(ours._npu_quantize_kv.default, (Slot(x),), {}, [integers.number, scales.number])
        if x not in rounded:
            yield call
            continue
        weight, factors, *bias = call.args[1:]
        args = (*rounded[x], weight, factors, bias[0] if bias else None, shapes[x].dtype)
        yield Call(ours._npu_linear_int8.default, args, {}, call.results)


def _is_rounded_at_once(norm: Call, shapes: dict[int, torch.Tensor]) -> bool:
    """Whether one operator computes it and rounds: a plain weight, of the dtype of what is normed."""
    offset = norm.args[4] if len(norm.args) > 4 else norm.kwargs.get("weight_offset", 0.0)
    if offset != 0.0 or len(norm.args) < 4 or not all(map(is_slot, norm.args[:3])):
        return False
    if type(norm.args[3]) is not float or norm.args[3] <= 0.0:  # the operator wants more than nothing
        return False
    x, residual, weight = (shapes.get(value.number) for value in norm.args[:3])
    # Of tensors with symbolic sizes nothing may be asked; weights are parameters.
    if not (type(x) is type(residual) is torch.Tensor) or not isinstance(weight, torch.Tensor):
        return False
    is_plain = weight.dim() == 1 and x.dim() > 1 and weight.dtype == x.dtype == residual.dtype
    if not is_plain or not (x.is_contiguous() and residual.is_contiguous()):
        return False
    return _is_right(x.device, x.dtype, x.shape[-1])


def _norm(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return ours._npu_add_rms_norm_int8(*arguments)


@functools.cache
def _is_right(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether the operator gives what it is documented to give, on ``device``: compared with float64 once.

    For each width: rows that fit a core's memory, and such that do not, are done by other code.
    """
    source = torch.Generator("cpu").manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=source, device="cpu").to(dtype)

    x, residual, weight = normal(3, 1, width), normal(3, 1, width), normal(width)
    try:
        with torch.no_grad():
            found = _norm(*(each.to(device) for each in (x, residual, weight)), 1e-6)
            integers, scales, total = (each.cpu().double() for each in found)
    except Exception as fault:  # noqa: BLE001 - the status shows it, and the norm stays what it was
        words = str(fault).splitlines() or [""]
        ours._npu_count_fallback("add_rms_norm", f"aclnnAddRmsNormDynamicQuant raises: {words[0][:80]}")
        return False
    exact = x.double() + residual.double()
    unit = torch.finfo(dtype).eps
    is_sum = bool(((total - exact).abs() <= unit * exact.abs()).all())
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    is_near = bool(((integers * scales - normed).abs() <= 0.51 * scales + unit * normed.abs()).all())
    is_scale = bool((scales <= 1.01 * normed.abs().amax(-1, keepdim=True) / 127).all())
    if not (is_sum and is_near and is_scale):
        ours._npu_count_fallback("add_rms_norm", "aclnnAddRmsNormDynamicQuant differs from float64")
    return is_sum and is_near and is_scale
