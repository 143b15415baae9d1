"""``nn.Linear`` calls inside a served module; the layer itself stays a plain ``nn.Linear``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..eligibility import autocast, autocast_dtype, in_dtype, is_castable, observed, unserved
from ..report import CallCounter

ops = torch.ops.liteboost
_FORWARD = torch.nn.Linear.forward


def linear(original: torch.nn.Module, counter: CallCounter) -> Callable[..., torch.Tensor]:
    """``self.child(x)`` for a child that is exactly ``nn.Linear``, and still is when called."""

    def call(child: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        dtype = autocast_dtype(x)
        reason = layer_unserved(child, x, dtype)
        if reason:
            counter.count_fallback(reason)
            return child(x)
        counter.count_served()
        return ops.linear(*operands(x, dtype, child))

    vars(call)["counter"] = counter  # for those who make several such calls in one
    return call


def weight_and_bias(layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the attributes of a layer that `layer_unserved` has nothing against are.

    FSDP has plain tensors on the instance while it computes, in place of parameters.
    """
    # Straight from the dictionaries: attribute access on a module goes through __getattr__. It finds there
    # what neither the class (which is watched) nor the instance has.
    own: dict[str, Any] = layer.__dict__
    parameters: dict[str, Any] = layer._parameters
    weight: Any = own["weight"] if "weight" in own else parameters.get("weight")
    return weight, own["bias"] if "bias" in own else parameters["bias"]


def operands(
    x: torch.Tensor, dtype: torch.dtype | None, *layers: torch.nn.Module
) -> list[torch.Tensor | None]:
    """``x``, and weight and bias of each layer, in ``dtype`` if autocast computes in one."""
    given: list[torch.Tensor | None] = [x]
    for layer in layers:
        given += weight_and_bias(layer)
    if dtype is None:
        return given
    return [each if each is None else in_dtype(each, dtype) for each in given]


def layer_unserved(layer: torch.nn.Module, x: torch.Tensor, dtype: torch.dtype | None = None) -> str:
    """Why our ops do not serve ``layer(x)``: it is no plain ``nn.Linear``, or not ours to call.

    Args:
        dtype: What autocast computes in (`autocast_dtype`), if the caller casts the `operands`.
    """
    is_plain = type(x) is torch.Tensor
    if dtype is None and is_plain and (reason := autocast(x)):
        return reason  # first: where it is on, no layer is served, and each has a cast beside its product
    if type(layer) is not torch.nn.Linear:
        return f"the layer is a {type(layer).__module__}.{type(layer).__qualname__}"
    if torch.nn.Linear.forward is not _FORWARD:
        return "nn.Linear.forward was patched by someone else"
    if "bias" not in layer._parameters and "bias" not in layer.__dict__:
        return "the bias is no parameter"
    weight, bias = weight_and_bias(layer)
    if weight is None:
        return "the weight is no parameter"
    # The layer first: accelerate's hooks (offloading) are on every one, whose calls pay for each question.
    reason = observed(layer) or unserved(x, weight, bias, casts=dtype is not None)
    if reason:
        return reason
    if dtype is not None:
        return "" if is_castable(x, weight, bias) else "autocast"
    if not is_plain and (reason := autocast(x)):
        return reason
    return "weight of another dtype" if weight.dtype != x.dtype else ""
