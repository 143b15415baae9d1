"""Which parameters the tensors of a checkpoint become, by transformers' renaming and conversion."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.files import Slice
from ..layers import QuantizedExperts, QuantizedLinear


class ParameterNames:
    """Names of a checkpoint -> names of ``model``.

    Args:
        weight_mapping: How transformers renames and converts tensors of this model.
    """

    def __init__(self, model: torch.nn.Module, weight_mapping: Iterable[Any] | None) -> None:
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        mapping = list(weight_mapping or ())
        self._renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        self._converters = [each for each in mapping if isinstance(each, WeightConverter)]
        self._of_pattern = {pattern: each for each in self._converters for pattern in each.source_patterns}
        self._prefix, self.state = model.base_model_prefix, model.state_dict()

    def target_of(self, name: str) -> tuple[str, str | None]:
        """What a tensor becomes, and the pattern by which a converter takes it, or None."""
        from transformers.core_model_loading import rename_source_key

        target, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self.state)
        return (name, None) if target not in self.state and name in self.state else (target, pattern)

    def converter_of(self, pattern: str | None) -> Any:
        """The converter that has this pattern, or None."""
        return self._of_pattern.get(pattern)


@dataclass
class ParameterSource:
    """The tensors of a checkpoint that become one parameter.

    Attributes:
        name: Of the parameter.
        converter: What makes it of them; None where it is one of them under another name, or the same.
        tensors: (name in the checkpoint, the converter's pattern that it matches), in order.
    """

    name: str
    converter: Any = None
    tensors: list[tuple[str, str]] = field(default_factory=list)

    @property
    def first(self) -> str:
        """The name of the first tensor."""
        return self.tensors[0][0]

    def read(self, tensors: Mapping[str, Slice], model: torch.nn.Module) -> Tensor:
        """The parameter, of the ``tensors`` of all files."""
        if self.converter is None:
            return tensors[self.first][...]
        converter = copy.deepcopy(self.converter)
        for name, pattern in self.tensors:
            converter.add_tensor(self.name, name, pattern, lambda name=name: tensors[name][...])
        made = converter.convert(self.name, model=model, config=model.config)[self.name]
        return made[0] if isinstance(made, list) else made


def sources_of(model: torch.nn.Module, tensors: Iterable[str]) -> dict[str, ParameterSource]:
    """Of the parameters of ``model`` that ``tensors`` hold, by name.

    Of what becomes several parameters, the first stands for all.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import dot_natural_key

    names = ParameterNames(model, get_model_conversion_mapping(model))
    sources: dict[str, ParameterSource] = {}
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = names.target_of(name)
        source = sources.setdefault(target, ParameterSource(target, names.converter_of(pattern)))
        source.tensors.append((name, pattern or ""))
    return sources


def conversions_of_quantized(model: torch.nn.Module) -> list[Any]:
    """How `save_pretrained` renames what ``model`` holds, quantized layers one by one.

    Without what would take quantized experts apart, or make one tensor of several quantized layers.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter

    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # as transformers does where it has not loaded the model
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [each for each in mapping if not isinstance(each, PrefixChange)]
    kinds = QuantizedExperts, QuantizedLinear
    names = {f"{name}.weight": type(each) for name, each in model.named_modules() if isinstance(each, kinds)}

    def is_other(conversion: Any) -> bool:
        if not isinstance(conversion, WeightConverter):
            return True
        reverse = conversion.reverse_transform()
        found = {kind for name, kind in names.items() if reverse.rename_source_key(name)[1] is not None}
        joins = len(reverse.source_patterns) > 1 and any(issubclass(kind, QuantizedLinear) for kind in found)
        return not joins and not any(issubclass(kind, QuantizedExperts) for kind in found)

    return [conversion for conversion in conversions if is_other(conversion)]
