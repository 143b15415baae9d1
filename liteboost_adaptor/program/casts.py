"""Steps under autocast: a program makes the casts that a step makes, those of parameters by torch's cache.

Autocast casts below Python and above the operators that are recorded, so a recording has its casts, and runs
are made without it. Where a parameter may want gradients, torch keeps its cast until the outermost block of
autocast ends; runs take and leave it there, too.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..eligibility import HALVES
from .passes import Step, is_slot
from .recording import Call, Recording
from .tensors import memory

aten, ours = torch.ops.aten, torch.ops.liteboost
_FAULT = "under autocast"
#: Kinds of devices with an autocast of their own, beside the CPU.
_OTHERS = (
    "cuda",
    "xpu",
    "ipu",
    "hpu",
    "xla",
    "mps",
    "mtia",
    "maia",
    torch._C._get_privateuse1_backend_name(),
)


def fault(tokens: Any) -> str:
    """Why no step that is given ``tokens`` can be recorded under the autocast that is on, if one is."""
    if not torch._C._is_any_autocast_enabled():
        return ""
    if not (isinstance(tokens, torch.Tensor) and tokens.is_cpu and torch.is_autocast_enabled("cpu")):
        return _FAULT
    if torch.get_autocast_dtype("cpu") not in HALVES or not hasattr(ours, "_autocast_weight"):
        return _FAULT
    if not _is_in_block():
        return _FAULT
    return _FAULT if any(map(torch.is_autocast_enabled, _OTHERS)) else ""


def _is_in_block() -> bool:
    """Whether a block is open whose end empties the cache; else the end of each that a model opens does."""
    torch.autocast_increment_nesting()
    return bool(torch.autocast_decrement_nesting())


def dtype() -> torch.dtype | None:
    """What autocast computes in; None where it is off. Programs of one do not serve steps of another."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


class KeptCasts:
    """The casts that autocast has kept of parameters since former steps: no operator of the step makes them.

    Args:
        tensors: What was there before the step.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = tensors
        self._dtype = dtype()  # in the middle of an operator autocast seems to be off

    def parameter_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The parameter that ``tensor`` is a kept cast of, if it is one."""
        if self._dtype != tensor.dtype or not torch.is_autocast_cache_enabled() or not tensor.dim():
            return None
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            for each in self._tensors:
                # To ask for the cast of another one would make it.
                is_alike = _may_be_kept(each) and each.shape == tensor.shape
                if is_alike and torch.equal(each[:1].to(tensor.dtype), tensor[:1]):
                    if memory(ours._autocast_weight(each, tensor.dtype)) == memory(tensor):
                        return each
        return None


def settle(recording: Recording, by_autocast: Container[int], made: dict[int, torch.Tensor]) -> None:
    """Let runs take from autocast's cache what the step that was recorded has left there, and nothing else.

    Where autocast is off around the step, the end of a block that the model opens empties the cache. Its
    casts are no more than casts then, for nobody would empty it behind a run.

    Args:
        recording: Of the step.
        by_autocast: The slots of what autocast may have cast.
        made: What the step has made, by its slot.
    """
    is_on = dtype() is not None
    calls = _with_kept_casts(recording, by_autocast, made) if is_on else _without_cache(recording)
    recording.calls = list(calls)


def _without_cache(recording: Recording) -> Iterator[Step]:
    for call in recording.calls:
        if isinstance(call, Call) and call.function is ours._autocast_weight.default:
            yield Call(aten._to_copy.default, call.args[:1], {"dtype": call.args[1]}, call.results)
        else:
            yield call


def _with_kept_casts(
    recording: Recording, by_autocast: Container[int], made: dict[int, torch.Tensor]
) -> Iterator[Step]:
    kept: set[int] = set()
    for noted in recording.calls:
        call = noted
        if isinstance(noted, Call) and noted.results[0] in by_autocast and _is_kept(noted, recording, made):
            call = _from_cache(noted)
        if isinstance(call, Call) and call.function is ours._autocast_weight.default:
            # One tensor, and so one slot, for all that multiply by it.
            if call.results[0] in kept:
                continue
            kept.add(call.results[0])
        yield call


def _from_cache(cast: Call) -> Call:
    return Call(ours._autocast_weight.default, (cast.args[0], cast.kwargs["dtype"]), {}, cast.results)


def _is_kept(call: Call, recording: Recording, made: dict[int, torch.Tensor]) -> bool:
    """Whether ``call`` is a cast that autocast has kept, and nobody else's."""
    if call.kwargs != {"dtype": dtype()} or not is_slot(call.args[0]):
        return False
    parameter = recording.constants.get(call.args[0].number)
    if parameter is None or not _may_be_kept(parameter):
        return False
    cast = ours._autocast_weight(parameter, call.kwargs["dtype"])
    return bool(cast.data_ptr() == made[call.results[0]].data_ptr())


def is_made_by_autocast(func: Any) -> bool:
    """Whether an operator that is noted may be a cast that autocast makes: it seems to be off then."""
    return func is aten._to_copy.default and not torch.is_autocast_enabled("cpu")


def _may_be_kept(tensor: torch.Tensor) -> bool:
    """Whether autocast keeps what it casts of ``tensor``."""
    is_parameter = isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad
    return is_parameter and tensor.is_cpu and tensor.dtype == torch.float32
