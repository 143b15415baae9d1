"""What a parameter of a model is made of in a checkpoint, by transformers' own renaming and conversion."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.files import Slice


@dataclass
class Origin:
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


def origins_of(model: torch.nn.Module, tensors: Mapping[str, Slice]) -> dict[str, Origin]:
    """Of the parameters of ``model`` that ``tensors`` hold, by name.

    Of what becomes several parameters, the first stands for all.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = list(get_model_conversion_mapping(model) or ())
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    wanted = model.state_dict()
    found: dict[str, Origin] = {}
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = name, None
        origin = found.setdefault(target, Origin(target, of_pattern.get(pattern)))
        origin.tensors.append((name, pattern or ""))
    return found
