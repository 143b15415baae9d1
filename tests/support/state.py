"""Snapshots, by identity, of everything outside and inside a model that serving it could change."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch

import liteboost_adaptor


def pristine() -> None:
    """Take back everything, so that a test decides itself what is served."""
    liteboost_adaptor.undo()


@pytest.fixture(autouse=True)
def served_on_request() -> Iterator[None]:
    """Models are served when a test says so, and left as they were after it; for folders that import this."""
    pristine()
    yield
    pristine()


def _registries() -> dict[str, Mapping[str, Any]]:
    """Every mapping behind transformers' extension points."""
    from transformers import cache_utils, masking_utils, modeling_utils, quantizers
    from transformers.activations import ACT2FN

    found: dict[str, Mapping[str, Any]] = {
        "attention": modeling_utils.AttentionInterface._global_mapping,
        "attention, local": modeling_utils.ALL_ATTENTION_FUNCTIONS._local_mapping,
        "mask": masking_utils.AttentionMaskInterface._global_mapping,
        "activations": dict(dict.items(ACT2FN)),  # asked politely it makes a new instance each time
        "quantizers": quantizers.auto.AUTO_QUANTIZER_MAPPING,
    }
    if importlib.util.find_spec("transformers.integrations.moe"):  # from transformers 5.0
        found["experts"] = importlib.import_module(
            "transformers.integrations.moe"
        ).ExpertsInterface._global_mapping
    for name in ("LAYER_TYPE_CACHE_MAPPING", "DYNAMIC_LAYER_TYPE_MAPPING", "STATIC_LAYER_TYPE_MAPPING"):
        if hasattr(cache_utils, name):
            found[name] = getattr(cache_utils, name)
    return found


def _namespaces(models: Iterable[torch.nn.Module]) -> dict[str, Mapping[str, Any]]:
    """``vars()`` of every class and every Python module behind the parts of ``models``."""
    classes = {cls for model in models for part in model.modules() for cls in type(part).__mro__}
    modules = {cls.__module__ for cls in classes} | {
        "transformers.modeling_utils",
        "transformers.masking_utils",
        "transformers.cache_utils",
        "transformers.integrations.sdpa_attention",
        "transformers.generation.utils",
        "torch",
        "torch.nn.functional",
    }
    found: dict[str, Mapping[str, Any]] = {f"class {cls!r} {id(cls)}": vars(cls) for cls in classes}
    found |= {f"module {name}": vars(sys.modules[name]) for name in modules if name in sys.modules}
    return found


class Snapshot:
    """What was where; holds the objects, so that an identity cannot be used again by another one."""

    def __init__(self, *models: torch.nn.Module) -> None:
        self.models = models
        self._spaces = self._copy()
        self._classes = [type(part) for model in models for part in model.modules()]
        self._own = [dict(vars(part)) for model in models for part in model.modules()]

    def _copy(self) -> dict[str, dict[str, Any]]:
        spaces = {**_registries(), **_namespaces(self.models)}
        # `copy.deepcopy` keeps the names of a class's slots in it.
        return {
            name: {key: value for key, value in space.items() if key != "__slotnames__"}
            for name, space in spaces.items()
        }

    def differences(self) -> list[str]:
        """A sentence for each thing that is not the very object it was."""
        found = []
        now = self._copy()
        for name in self._spaces.keys() | now.keys():
            before, after = self._spaces.get(name, {}), now.get(name, {})
            found += [f"{name}: {key} is gone" for key in before.keys() - after.keys()]
            found += [f"{name}: {key} is new" for key in after.keys() - before.keys()]
            found += [
                f"{name}: {key} is another"
                for key in before.keys() & after.keys()
                if before[key] is not after[key]
            ]
        parts = [part for model in self.models for part in model.modules()]
        for part, cls, own in zip(parts, self._classes, self._own, strict=True):
            if type(part) is not cls:
                found.append(f"{cls.__qualname__}: an instance has another class")
            if vars(part).keys() != own.keys() or any(vars(part)[key] is not own[key] for key in own):
                found.append(f"{cls.__qualname__}: an instance has other attributes")
        return sorted(found)


def rows(*families: str) -> dict[str, list[Any]]:
    """Rows of the status with targets, by state; only of these families of rules when given."""
    found: dict[str, list[Any]] = {}
    for row in liteboost_adaptor.status().rules:
        if row.targets and (not families or row.id.split(".")[0] in families):
            found.setdefault(row.state, []).append(row)
    return found
