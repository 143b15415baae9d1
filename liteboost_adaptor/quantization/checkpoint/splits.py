"""Tensors of a checkpoint of which transformers splits several layers, some of them quantized.

Its `Split` cuts by the sizes of parameters, and a quantized layer has buffers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..layers import QuantizedLinear

#: Outputs and inputs of a weight, by its name and layer, that is quantized once it is read.
Sizes = Callable[[str, QuantizedLinear], tuple[int, int]]


def of_layers(conversions: Iterable[Any], sizes: Sizes | None) -> list[Any]:
    """``conversions``, of which those that split know layers of all kinds.

    Args:
        sizes: None where the checkpoint holds what layers keep.
    """
    kind = _kind()
    found = list(conversions)
    for conversion in found:
        operations = getattr(conversion, "operations", ())
        if kind is not None and any(type(each) in kind.__bases__ for each in operations):
            conversion.operations = [
                kind(each.dim, sizes) if type(each) in kind.__bases__ else each for each in operations
            ]
    return found


def asks_for_parameter(operation: Any) -> bool:
    """Whether a conversion asks for the parameter that it fills, and `of_layers` does not exchange it."""
    kind = _kind()
    if kind is not None and isinstance(operation, kind.__bases__):
        return False
    if not getattr(operation, "check_dims", True):  # of `Transpose`
        return False
    return "get_parameter" in _names_in(type(operation).convert)


def _names_in(function: Callable[..., Any]) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return () if code is None else code.co_names


@functools.cache
def _kind() -> Any:
    """Of transformers' operation, or None where it has none (before 5.24)."""
    from transformers import core_model_loading
    from transformers.quantizers.quantizers_utils import get_module_from_name

    split = getattr(core_model_loading, "Split", None)
    if split is None:
        return None

    class SplitOfLayers(split):
        """The same for layers of all kinds."""

        def __init__(self, dim: int, sizes: Sizes | None) -> None:
            super().__init__(dim)
            self._sizes = sizes

        def __deepcopy__(self, memo: dict[int, Any]) -> SplitOfLayers:
            return self

        @torch.no_grad()
        def convert(
            self,
            input_dict: dict[str, Any],
            source_patterns: list[str],
            target_patterns: list[str],
            full_layer_name: str,
            model: torch.nn.Module,
            **kwargs: Any,
        ) -> dict[str, torch.Tensor]:
            (given,) = input_dict.values()
            tensor = given[0] if isinstance(given, list) else given
            lengths = []
            for target in target_patterns:
                name = full_layer_name.replace(target_patterns[0], target)
                module, attribute = get_module_from_name(model, name)
                shape = tuple(getattr(module, attribute).shape)
                if self._sizes is not None and isinstance(module, QuantizedLinear) and attribute == "weight":
                    shape = self._sizes(name, module)[:: -1 if module.is_transposed else 1]
                lengths.append(shape[self.dim])
            parts = torch.split(tensor, lengths, dim=self.dim)
            return {target: part.contiguous() for target, part in zip(target_patterns, parts, strict=True)}

    return SplitOfLayers
