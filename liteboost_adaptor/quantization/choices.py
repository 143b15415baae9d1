"""Which layers of a model are quantised, and to what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..errors import QuantizationError
from ..report import APPLIED, REFUSED, Outcome, report
from .config import LiteBoostConfig
from .names import RULE
from .readers import read_weights
from .schemes import Scheme
from .stored import Stored


@dataclass(frozen=True)
class Choice:
    """A linear layer of a model.

    Attributes:
        name: As `torch.nn.Module.get_submodule` takes it.
        layer: The layer.
        scheme: What it is quantised to, or None.
        reason: Why it stays as it is, if nobody asked for that.
        tied: The name of the parameter that its weight is, where it is another module's, too.
    """

    name: str
    layer: torch.nn.Linear
    scheme: Scheme | None
    reason: str = ""
    tied: str = ""


def choices(model: torch.nn.Module, config: LiteBoostConfig) -> Iterator[Choice]:
    """Every ``nn.Linear`` of ``model``, and what becomes of it."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    stored = config.stored()
    if stored is not None:
        yield from _of_stored(model, stored)
        return
    kept = list(config.modules_to_not_convert or [])
    kept += [name.removesuffix(".weight") for name in getattr(model, "_keep_in_fp32_modules", None) or ()]
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    tied = getattr(model, "all_tied_weights_keys", {})
    sources = set(tied.values())
    read = read_weights(model)
    for name, layer in model.named_modules():
        if type(layer) is not torch.nn.Linear and not _is_bound_linear(layer):
            continue
        if not should_convert_module(name, kept):
            yield Choice(name, layer, None)
            continue
        scheme = config.of_head() if layer is head else config.of_layers()
        weight = f"{name}.weight"
        reason = ""
        if scheme is not None:
            reason = scheme.unsuited(layer.out_features, layer.in_features)
            if weight in sources or (weight in tied and layer is not head):
                reason = "its weight is another module's, too"
            if name in read:
                reason = "the model's code reads its weight, beside calling it"
        yield Choice(name, layer, None if reason else scheme, reason, tied.get(weight, ""))


def _of_stored(model: torch.nn.Module, stored: dict[str, Stored]) -> Iterator[Choice]:
    modules = dict(model.named_modules())
    tied = getattr(model, "all_tied_weights_keys", {})
    for name, scheme in stored.items():
        layer = modules.get(name)
        if not isinstance(layer, torch.nn.Linear):
            raise QuantizationError(
                f"quantization_config names the layer {name}, and {type(model).__name__} has no linear layer "
                "of that name: it was written for another model"
            )
        yield Choice(name, layer, scheme, tied=tied.get(f"{name}.weight", ""))


def _is_bound_linear(layer: torch.nn.Module) -> bool:
    # A bound layer is of a subclass of the same name, see engine.swap.
    return isinstance(layer, torch.nn.Linear) and type(layer).__qualname__ == torch.nn.Linear.__qualname__


def note(model: torch.nn.Module, made: list[Choice]) -> None:
    """What the status says of a model's layers."""
    for choice in made:
        if choice.scheme is not None:
            report.add(Outcome(RULE, APPLIED, choice.scheme.name))
        elif choice.reason:
            report.add(Outcome(RULE, REFUSED, choice.name, f"stays as it is: {choice.reason}"))


def untie(model: torch.nn.Module, choice: Choice) -> None:
    """Let a head that is quantised have a weight of its own."""
    weight = f"{choice.name}.weight"
    ties = getattr(model, "all_tied_weights_keys", {})
    ties.pop(weight, None)
    for config in (model.config, model.config.get_text_config()):
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False
