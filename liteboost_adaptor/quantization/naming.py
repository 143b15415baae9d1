"""Which layers of a model the tensors of a checkpoint are for, by transformers' own renaming."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .experts import QuantizedExperts


def owners(model: torch.nn.Module, names: Iterable[str], weight_mapping: Iterable[Any]) -> dict[str, str]:
    """Layer of the checkpoint -> linear layer of ``model``; empty where it becomes part of something else.

    Args:
        names: Of layers of the checkpoint.
        weight_mapping: How transformers renames and converts tensors of this model.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = list(weight_mapping or ())
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    wanted, modules = model.state_dict(), dict(model.named_modules())
    found = {}
    for name in names:
        key = f"{name}.weight"
        target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
        if target not in wanted and key in wanted:
            target, pattern = key, None
        owner = target.removesuffix(".weight")
        is_linear = pattern is None and isinstance(modules.get(owner), torch.nn.Linear)
        found[name] = owner if is_linear else ""
    return found


def target_of(model: torch.nn.Module, name: str, weight_mapping: Iterable[Any], wanted: Any) -> str:
    """What the tensor ``name`` of a checkpoint is called in ``model``, whose state is ``wanted``."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    if name in wanted:
        return name
    mapping = list(weight_mapping or ())
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    return rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)[0]


def without_experts(model: torch.nn.Module) -> list[Any]:
    """How `save_pretrained` renames what ``model`` holds, without what would take quantised experts apart."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter

    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # as transformers does where it has not loaded the model
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [each for each in mapping if not isinstance(each, PrefixChange)]
    names = [f"{name}.weight" for name, each in model.named_modules() if isinstance(each, QuantizedExperts)]

    def takes_apart(conversion: Any) -> bool:
        if not isinstance(conversion, WeightConverter):
            return False
        reverse = conversion.reverse_transform()
        return any(reverse.rename_source_key(name)[1] is not None for name in names)

    return [conversion for conversion in conversions if not takes_apart(conversion)]
