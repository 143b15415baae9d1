"""``nn.Linear`` calls inside a served module; the layer itself stays a plain ``nn.Linear``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..eligibility import autocast, observed, unserved
from ..report import CallCounter

ops = torch.ops.liteboost
_FORWARD = torch.nn.Linear.forward


def linear(original: torch.nn.Module, counter: CallCounter) -> Callable[..., torch.Tensor]:
    """``self.child(x)`` for a child that is exactly ``nn.Linear``, and still is when called."""

    def call(child: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        reason = layer_unserved(child, x)
        if reason:
            counter.count_fallback(reason)
            return child(x)
        counter.count_served()
        parameters = child._parameters
        return ops.linear(x, parameters["weight"], parameters["bias"])

    vars(call)["counter"] = counter  # for those who make several such calls in one
    return call


def layer_unserved(layer: torch.nn.Module, x: torch.Tensor) -> str:
    """Why our ops do not serve ``layer(x)``: it is no plain ``nn.Linear``, or not ours to call."""
    is_plain = type(x) is torch.Tensor
    if is_plain and (reason := autocast(x)):
        return reason  # first: where it is on, no layer is served, and each has a cast beside its product
    if type(layer) is not torch.nn.Linear:
        return f"the layer is a {type(layer).__module__}.{type(layer).__qualname__}"
    if torch.nn.Linear.forward is not _FORWARD:
        return "nn.Linear.forward was patched by someone else"
    # Straight from the dictionary: attribute access on a module goes through __getattr__. It finds there what
    # neither the class (which is watched) nor the instance has.
    parameters, own = layer._parameters, layer.__dict__
    if "weight" in own or "bias" in own or "bias" not in parameters:
        return "the weight or bias is no parameter"
    weight, bias = parameters.get("weight"), parameters["bias"]
    if weight is None:
        return "the weight is no parameter"
    reason = unserved(x, weight, bias) or observed(layer) or ("" if is_plain else autocast(x))
    return reason or ("weight of another dtype" if weight.dtype != x.dtype else "")
