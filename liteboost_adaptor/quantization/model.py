"""Which layers of a model are quantised, and models that are loaded already."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..errors import QuantizationError
from ..report import APPLIED, REFUSED, Outcome, report
from .calibration import Calibration, blocks_of, calibrate
from .config import LiteBoostConfig
from .layers import QuantizedLinear
from .readers import read_weights
from .registration import RULE
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


def arrange(model: torch.nn.Module) -> None:
    """Lay out the weights of the quantised layers of ``model`` as its CPU reads them fastest.

    Layers whose weights accelerate brings in for each call are elsewhere now, and come as they are saved.
    """
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            layer.arrange()


def untie(model: torch.nn.Module, choice: Choice) -> None:
    """Let a head that is quantised have a weight of its own."""
    weight = f"{choice.name}.weight"
    ties = getattr(model, "all_tied_weights_keys", {})
    ties.pop(weight, None)
    for config in (model.config, model.config.get_text_config()):
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False


def quantize_model(model: torch.nn.Module, config: LiteBoostConfig) -> torch.nn.Module:
    """Quantise a loaded ``model`` in place, layer by layer; each layer's former weight is freed at once.

    Args:
        model: A model of transformers, not quantised, on the CPU.
        config: What to.

    Returns:
        ``model``, which `save_pretrained` writes quantised.

    Raises:
        QuantizationError: It is quantised already, has no layer for it, or a weight cannot be rounded.
    """
    from .quantizer import LiteBoostQuantizer

    if getattr(model, "hf_quantizer", None) is not None:
        method = model.hf_quantizer.quantization_config.quant_method
        raise QuantizationError(
            f"{type(model).__name__} is quantised already ({getattr(method, 'value', method)}); load it "
            "without that"
        )
    made = list(choices(model, config))
    convert(model, config, made)
    LiteBoostQuantizer(config, pre_quantized=False).claim(model)
    note(model, made)
    return model


def convert(model: torch.nn.Module, config: LiteBoostConfig, made: list[Choice]) -> None:
    """Put quantised layers in the place of those that are ``made`` so, by a text where ``config`` has one.

    Raises:
        QuantizationError: There is none, or a weight cannot be rounded.
    """
    if not any(choice.scheme for choice in made):
        raise QuantizationError(
            f"{type(model).__name__} has no linear layer that {config.scheme} takes: "
            + ("; ".join(sorted({c.reason for c in made if c.reason})) or "it has none at all")
        )
    calibration = Calibration()
    if config.calibrate:
        calibration = calibrate(model, blocks_of(model, config.calibrate), config.method, made)
    for choice in made:
        if choice.scheme is None:
            continue
        if choice.tied:
            untie(model, choice)
        rounded = calibration.quantize(choice, choice.layer.weight.detach())
        model.set_submodule(choice.name, QuantizedLinear.of(choice.layer, choice.scheme, rounded))
    with torch.no_grad():
        for name, value in calibration.parameters.items():
            model.get_parameter(name).copy_(value)
    for name, reason in calibration.kept:
        report.add(Outcome(RULE, REFUSED, name, reason))
    arrange(model)
