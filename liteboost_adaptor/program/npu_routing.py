"""Routers of groups of experts (DeepSeek V3) in a recording on an NPU: one operator does their work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .def_use import DefUse, as_torch_casts
from .passes import Step
from .recording import Call, Slot

aten, ours = torch.ops.aten, torch.ops.liteboost
_CONTIGUOUS = {"memory_format": torch.contiguous_format}
#: Operator, arguments, keywords and results; a text stands for one slot or number, wherever it stands.
_Line = tuple[Any, tuple[Any, ...], dict[str, Any], list[str]]
_CHOICE: tuple[_Line, ...] = (
    (aten.sigmoid.default, ("logits",), {}, ["all"]),
    (aten.add.Tensor, ("all", "bias"), {}, ["biased"]),
    (aten.view.default, ("biased", [-1, "groups", "size"]), {}, ["grouped"]),
    (aten.topk.default, ("grouped", 2), {}, ["best", "best experts"]),
    (aten.sum.dim_IntList, ("best", [-1]), {}, ["strength"]),
    (aten.topk.default, ("strength", "topk_group", -1, True, False), {}, ["strongest", "open groups"]),
    (aten.zeros_like.default, ("strength",), {"pin_memory": False}, ["mask"]),
    (aten.scatter_.value, ("mask", 1, "open groups", 1), {}, ["mask"]),
    (aten.unsqueeze.default, ("mask", -1), {}, ["column"]),
    (aten.expand.default, ("column", [-1, "groups", "size"]), {}, ["expanded"]),
)
#: ``reshape`` of what was expanded: a copy, or a view where there is one group or one expert in each.
_RESHAPES: tuple[tuple[_Line, ...], ...] = (
    (
        (aten.clone.default, ("expanded",), _CONTIGUOUS, ["copied"]),
        (aten._unsafe_view.default, ("copied", ["tokens", "experts"]), {}, ["flat"]),
    ),
    ((aten.view.default, ("expanded", ["tokens", "experts"]), {}, ["flat"]),),
)
_SCORES: tuple[_Line, ...] = (
    (aten._to_copy.default, ("flat",), {"dtype": torch.bool}, ["is open"]),
    (aten.bitwise_not.default, ("is open",), {}, ["closed"]),
    (aten.masked_fill.Scalar, ("biased", "closed", -torch.inf), {}, ["open"]),
    (aten.topk.default, ("open", "k", -1, True, False), {}, ["chosen", "index"]),
    (aten.gather.default, ("all", 1, "index"), {}, ["weights"]),
    (aten.sum.dim_IntList, ("weights", [-1], True), {}, ["total"]),
    (aten.add.Tensor, ("total", "eps"), {}, ["divisor"]),
    (aten.div_.Tensor, ("weights", "divisor"), {}, ["weights"]),
    (aten.mul.Tensor, ("weights", "factor"), {}, ["scores"]),
)
_FORMS = tuple((*_CHOICE, *reshape, *_SCORES) for reshape in _RESHAPES)


@dataclass
class Routing:
    """The calls that one operator does the work of.

    Attributes:
        calls: By identity.
        function: The operator.
        results: Slots of the scores and of the experts' numbers, which are int32 from then on.
    """

    calls: set[int]
    function: Any
    args: tuple[Any, ...]
    results: list[int]


def grouped_routings(
    calls: list[Step], uses: DefUse, shapes: dict[int, torch.Tensor]
) -> Iterator[tuple[Routing, list[Call]]]:
    """Every such router that the operator takes, with its calls."""
    if not hasattr(ours, "_npu_grouped_topk_refusal"):
        return
    for at, call in enumerate(calls):
        if not isinstance(call, Call) or call.function is not aten.sigmoid.default:
            continue
        for form in _FORMS:
            own = [each for each in calls[at : at + len(form)] if isinstance(each, Call)]
            found: dict[str, Any] = {}
            is_it = len(own) == len(form) and all(
                _is_line(line, as_torch_casts(each), found) for line, each in zip(form, own, strict=True)
            )
            if is_it:
                routing = _routing(own, found, shapes)
                if routing is not None and uses.is_inside(own, routing.results):
                    yield routing, own


def _routing(own: list[Call], found: dict[str, Any], shapes: dict[int, torch.Tensor]) -> Routing | None:
    logits, bias = (shapes.get(found[name].number) for name in ("logits", "bias"))
    if type(logits) is not torch.Tensor or logits.device.type != "npu" or logits.dim() != 2:
        return None
    if bias is None or bias.dim() != 1 or found["groups"] * found["size"] != logits.shape[1]:
        return None
    numbers = [found[name] for name in ("k", "groups", "topk_group", "factor", "eps")]
    if ours._npu_grouped_topk_refusal(logits, bias, *numbers[:3]):
        return None
    args = (found["logits"], found["bias"], *numbers)
    results = [found["scores"].number, found["index"].number]
    return Routing({id(call) for call in own}, ours._npu_grouped_topk.default, args, results)


def _is_line(line: _Line, call: Call, found: dict[str, Any]) -> bool:
    function, args, kwargs, results = line
    if call.function is not function or call.kwargs != kwargs or len(call.args) != len(args):
        return False
    made = list(map(Slot, call.results))
    return _is_like(list(args), list(call.args), found) and _is_like(results, made, found)


def _is_like(pattern: Any, value: Any, found: dict[str, Any]) -> bool:
    if isinstance(pattern, str):
        return bool(found.setdefault(pattern, value) == value)
    if isinstance(pattern, list):
        if not isinstance(value, list | tuple) or len(value) != len(pattern):
            return False
        return all(_is_like(one, other, found) for one, other in zip(pattern, value, strict=True))
    return type(value) is type(pattern) and bool(value == pattern)
