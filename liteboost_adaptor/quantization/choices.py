"""Which layers of a model are quantised, and to what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from ..eligibility import class_as_written
from ..errors import QuantizationError
from ..huggingface.class_code import is_product
from ..replacements.experts import weights_of
from ..report import APPLIED, REFUSED, Outcome, report
from .config import LiteBoostConfig
from .experts import Experts, QuantizedExperts
from .layers import QuantizedLinear
from .names import RULE
from .readers import read_weights
from .schemes import Scheme
from .stored import Stored
from .weights import QuantizedWeight


@dataclass(frozen=True)
class Choice:
    """A linear layer of a model, or a parameter with the weights of a layer's experts.

    Attributes:
        name: As `torch.nn.Module.get_submodule` takes it once it is quantised.
        layer: The layer; of experts, the module that has the parameter.
        scheme: What it is quantised to, or None.
        reason: Why it stays as it is, if nobody asked for that.
        tied: The name of the parameter that its weight is, where it is another module's, too.
        experts: What the parameter of experts is; of a linear layer None.
    """

    name: str
    layer: torch.nn.Module
    scheme: Scheme | None
    reason: str = ""
    tied: str = ""
    experts: Experts | None = None

    @property
    def parameter(self) -> str:
        """The name of the weight before it is quantised."""
        return f"{self.name}.weight" if self.experts is None else self.name

    def made(self, device: Any = None) -> QuantizedWeight:
        """What stands in its place, not filled yet; a linear layer without a bias."""
        layer, scheme = self.layer, self.scheme
        assert scheme is not None
        if self.experts is not None:
            dtype = getattr(layer, self.name.rpartition(".")[2]).dtype
            made: QuantizedWeight = QuantizedExperts(self.experts, scheme, dtype, device)
        else:
            outputs, inputs = sizes_of(layer)
            made = QuantizedLinear(inputs, outputs, False, scheme, layer.weight.dtype, device)
            made.is_transposed = self.is_transposed
        return made.train(layer.training)

    @property
    def is_transposed(self) -> bool:
        """Whether a linear layer keeps its weight ``[in, out]``."""
        return self.experts is None and isinstance(self.layer, Conv1D)

    def matrix(self, weight: Tensor) -> Tensor:
        """The parameter as `Quantized.dequantized` gives it back."""
        if self.experts is not None:
            return self.experts.matrix(weight)
        return weight.t().contiguous() if self.is_transposed else weight


def choices(model: torch.nn.Module, config: LiteBoostConfig) -> Iterator[Choice]:
    """Every linear layer of ``model``, every parameter of experts, and what becomes of it."""
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
        if not _is_linear(layer):
            yield from _of_experts(name, layer, config, kept)
            continue
        if not should_convert_module(name, kept):
            yield Choice(name, layer, None)
            continue
        scheme = config.of_head() if layer is head else config.of_layers()
        weight = f"{name}.weight"
        reason = ""
        if scheme is not None:
            reason = scheme.unsuited(*sizes_of(layer))
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


def _of_experts(
    name: str, module: torch.nn.Module, config: LiteBoostConfig, kept: list[str]
) -> Iterator[Choice]:
    from transformers.quantizers.quantizers_utils import should_convert_module

    known = weights_of(module)
    for local, parameter in module.named_parameters(recurse=False):
        full = f"{name}.{local}"
        if local not in known or parameter.dim() != 3:
            if parameter.dim() == 3 and "expert" in type(module).__qualname__.lower():
                yield Choice(full, module, None, "experts of a form that is not read as integers")
            continue
        experts = Experts.of(parameter, known[local])
        scheme = config.of_experts()
        reason = experts.unsuited(scheme) if scheme is not None else ""
        if not (should_convert_module(name, kept) and should_convert_module(full, kept)):
            scheme, reason = None, ""
        yield Choice(full, module, None if reason else scheme, reason, experts=experts)


def _is_linear(layer: torch.nn.Module) -> bool:
    """Whether it computes what ``nn.Linear`` does: that, ``Conv1D``, or a class that says it otherwise."""
    cls = class_as_written(layer)
    # A bound layer is of a subclass of the same name, see engine.swap.
    is_plain = isinstance(layer, torch.nn.Linear) and cls.__qualname__ == torch.nn.Linear.__qualname__
    return is_plain or isinstance(layer, Conv1D) or is_product(cls)


def sizes_of(layer: torch.nn.Module) -> tuple[int, int]:
    """Outputs and inputs of a linear layer."""
    return (layer.nf, layer.nx) if isinstance(layer, Conv1D) else (layer.out_features, layer.in_features)


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
