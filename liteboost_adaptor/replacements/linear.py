"""``nn.Linear`` calls inside a served module; the layer itself stays a plain ``nn.Linear``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..report import Tally
from .guards import autocast, observed, unserved

ops = torch.ops.liteboost
_FORWARD = torch.nn.Linear.forward


def linear(original: torch.nn.Module, tally: Tally) -> Callable[..., torch.Tensor]:
    """``self.child(x)`` for a child that is exactly ``nn.Linear``, and still is when called."""

    def call(child: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        if type(child) is not torch.nn.Linear:
            reason = f"the layer is a {type(child).__module__}.{type(child).__qualname__}"
        elif torch.nn.Linear.forward is not _FORWARD:
            reason = "nn.Linear.forward was patched by someone else"
        else:
            # Straight from the dictionary: attribute access on a module goes through __getattr__.
            parameters = child._parameters
            weight, bias = parameters.get("weight"), parameters.get("bias")
            if weight is None:
                reason = "the weight is no parameter"
            else:
                reason = unserved(x, weight, bias) or observed(child) or autocast(x)
                if not reason and weight.dtype != x.dtype:
                    reason = "weight of another dtype"
        if reason:
            tally.fell_back(reason)
            return child(x)
        tally.served()
        return ops.linear(x, weight, bias)

    return call
