"""Layers of a loaded model become quantised ones."""

from __future__ import annotations

import torch

from .. import memory
from ..errors import QuantizationError
from ..report import REFUSED, Outcome, report
from .calibration import Calibration, blocks_of, calibrate
from .choices import Choice, untie
from .config import LiteBoostConfig
from .names import RULE
from .rounding import Quantized
from .weights import QuantizedWeight

#: Bytes after which freed memory is given back: an allocator keeps what lies between other memory.
_FREED = 32 << 20


def convert(model: torch.nn.Module, config: LiteBoostConfig, made: list[Choice]) -> None:
    """Put quantised layers in the place of those that are ``made`` so, by a text where ``config`` has one.

    Raises:
        QuantizationError: There is none, or a weight cannot be rounded.
    """
    if not any(choice.scheme for choice in made):
        raise QuantizationError(
            f"{type(model).__name__} has no layer that {config.scheme} takes: "
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
        put(model, choice, calibration.quantize(choice, model.get_parameter(choice.parameter).detach()))
    with torch.no_grad():
        for name, value in calibration.parameters.items():
            model.get_parameter(name).copy_(value)
    for name, reason in calibration.kept:
        report.add(Outcome(RULE, REFUSED, name, reason))
    arrange(model)


def put(model: torch.nn.Module, choice: Choice, rounded: Quantized | None = None) -> QuantizedWeight:
    """Put what stands for ``choice`` in its place, on the meta device where it is not ``rounded`` yet."""
    made = choice.made("meta")
    if rounded is not None:
        made.fill(rounded)
    if choice.experts is None:
        bias = choice.layer.bias
        made.register_parameter("bias", bias)
        model.set_submodule(choice.name, made)
    else:
        local = choice.name.rpartition(".")[2]
        delattr(choice.layer, local)
        choice.layer.add_module(local, made)
    return made


def arrange(model: torch.nn.Module) -> None:
    """Lay out the weights of the quantised layers of ``model`` as its device reads them.

    Layers whose weights accelerate brings in for each call are elsewhere now, and come as they are saved.
    """
    freed = 0
    for layer in model.modules():
        if not isinstance(layer, QuantizedWeight) or layer.is_arranged:
            continue
        layer.arrange()
        freed += layer.weight.nbytes if layer.is_arranged else 0
        if freed > _FREED:  # else all that was read would stay beside what is made of it
            memory.give_back()
            freed = 0
