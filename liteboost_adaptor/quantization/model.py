"""Weights of a loaded model are replaced by quantized ones, and prepacked for its device."""

from __future__ import annotations

import torch

from .. import memory
from ..errors import QuantizationError
from ..report import REFUSED, Outcome, report
from .calibration.calibrate import Calibration, blocks_of, calibrate
from .config import LiteBoostConfig
from .identifiers import PLAN, RULE
from .layers import QuantizedLayer
from .layers.target import QuantTarget
from .schemes.rounding import check_finite
from .selection import report_targets, targets_of, untie

#: Bytes after which freed memory is given back: an allocator keeps what lies between other memory.
_FREED = 32 << 20


def convert(model: torch.nn.Module, config: LiteBoostConfig, targets: list[QuantTarget]) -> None:
    """Replace the ``targets`` that have a scheme by quantized modules, calibrated where ``config`` says so.

    Raises:
        QuantizationError: There is none, or a weight cannot be rounded.
    """
    chosen = [target for target in targets if target.scheme is not None]
    if not chosen:
        raise QuantizationError(
            f"{type(model).__name__} has no layer that {config.scheme} takes: "
            + ("; ".join(sorted({each.reason for each in targets if each.reason})) or "it has none at all")
        )
    for target in chosen:  # before the first is replaced: a model is quantized whole, or not at all
        check_finite(model.get_parameter(target.parameter).detach(), target.name)
    calibration = Calibration()
    if config.calibrate:
        calibration = calibrate(model, blocks_of(model, config.calibrate), config.method, targets)
    for target in chosen:
        untie(model, target)
        weight = model.get_parameter(target.parameter).detach()
        target.replace(model, calibration.quantize(target, weight))
    with torch.no_grad():
        for name, value in calibration.parameters.items():
            model.get_parameter(name).copy_(value)
    for name, reason in calibration.refused:
        report.add(Outcome(RULE, REFUSED, name, reason))
    prepack(model)


def prepack(model: torch.nn.Module) -> None:
    """Lay out the weights of the quantized layers of ``model`` as its device reads them.

    Layers whose weights accelerate brings in for each call are elsewhere now, and come as files have them.
    """
    freed = 0
    for layer in model.modules():
        if not isinstance(layer, QuantizedLayer) or layer.is_packed:
            continue
        layer.prepack()
        freed += layer.weight.nbytes if layer.is_packed else 0
        if freed > _FREED:  # else all that was read would stay beside what is made of it
            memory.give_back()
            freed = 0


def quantize_on_meta(model: torch.nn.Module, config: LiteBoostConfig) -> None:
    """Let ``model``, which is on the meta device, have quantized modules in place of its weights."""
    for target in list(targets_of(model, config)) if config.scheme else ():
        if target.scheme is not None:
            target.replace(model)
            untie(model, target)


def quantize_model(model: torch.nn.Module, config: LiteBoostConfig) -> torch.nn.Module:
    """Quantize a loaded ``model`` in place, layer by layer; each layer's former weight is freed at once.

    Args:
        model: A model of transformers, not quantized, on the CPU.
        config: What to.

    Returns:
        ``model``, which `save_pretrained` writes quantized.

    Raises:
        QuantizationError: It is quantized already, is sharded, has no layer for it, or a
            weight cannot be rounded.
    """
    from .hf_quantizer import LiteBoostQuantizer  # which converts models by this module

    if getattr(vars(model).get(PLAN), "shardings", None):
        raise QuantizationError(
            f"this {type(model).__name__} is sharded already, and a rank holds only a part of what "
            "shares a scale. Quantize it as it is loaded (LITEBOOST_QUANT, or quantization_config)"
        )
    if getattr(model, "hf_quantizer", None) is not None:
        method = model.hf_quantizer.quantization_config.quant_method
        raise QuantizationError(
            f"{type(model).__name__} is quantized already ({getattr(method, 'value', method)}); load it "
            "without that"
        )
    targets = list(targets_of(model, config))
    convert(model, config, targets)
    LiteBoostQuantizer(config, pre_quantized=False).claim(model)
    report_targets(targets)
    return model
