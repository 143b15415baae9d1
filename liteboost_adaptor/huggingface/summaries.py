"""What became of one bound model, for the status."""

from __future__ import annotations

from collections import Counter

import torch

from .. import native, native_npu
from ..engine import swap
from ..report import APPLIED, PROVED
from ..summary import ModelSummary
from .runtime import runtime


def summary_of(model: torch.nn.Module) -> ModelSummary:
    """What serves ``model``, which is bound, and what of it is not served and why."""
    name, settings, binding = type(model).__name__, runtime.settings_of(model), runtime.binding_of(model)
    marks = [mark for part in model.modules() if (mark := swap.mark_of(part)) is not None]
    served: Counter[str] = Counter()
    for mark in marks:
        served.update(o.rule for o in mark.outcomes if o.state in (APPLIED, PROVED))
    refused = Counter((o.rule, o.reason) for o in (binding.refusals if binding else ()))
    reason = ""
    if not marks:
        reason = (
            "level 0" if settings and not settings.level else _no_kernels() or "no rule fits a part of it"
        )
    return ModelSummary(name, len(marks), dict(served), dict(refused), reason)


def _no_kernels() -> str:
    """Which kernels are missing, or an empty string."""
    npu = native_npu.status()
    if not native.load().loaded:
        return "no kernels"
    return "" if npu is None or npu.loaded else "no kernels for NPUs"
