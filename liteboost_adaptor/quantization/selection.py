"""Which weights of a model are quantized, and to what."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator

import torch
from transformers.pytorch_utils import Conv1D

from ..eligibility import class_as_written
from ..errors import QuantizationError
from ..huggingface.class_code import is_product, methods
from ..replacements.experts import weights_of
from ..report import APPLIED, REFUSED, Outcome, report
from .checkpoint import splits
from .config import LiteBoostConfig
from .identifiers import RULE
from .layers import WeightShape
from .layers.target import QuantTarget, sizes_of
from .schemes import QuantScheme

#: Methods that run before weights are loaded, or where there is a GPU.
_ELSEWHERE = ("__init__", "_init_", "init_weights", "reset_", "tie_weights", "_tie", "resize_", "prune_")
_CUDA = "cuda"
#: What a configuration calls the setting that ties a head to the embedding.
_TIE = "tie_word_embeddings"
_BACK_REFERENCE = re.compile(r"\\\d")
_DOTTED = re.compile(r"\w+(\.\w+)*")


def targets_of(model: torch.nn.Module, config: LiteBoostConfig) -> Iterator[QuantTarget]:
    """Every linear layer of ``model``, every parameter of experts, and what becomes of it."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    schemes = config.schemes_by_layer()
    if schemes is not None:
        yield from _named_targets(model, schemes)
        return
    excluded = list(config.modules_to_not_convert or [])
    excluded += [name.removesuffix(".weight") for name in getattr(model, "_keep_in_fp32_modules", None) or ()]
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    tied = getattr(model, "all_tied_weights_keys", {})
    sources = set(tied.values())
    read_directly = _layers_read_directly(model)
    kept = _kept_by_conversions(model)
    places = Counter(id(child) for module in model.modules() for child in module._modules.values())
    for name, layer in model.named_modules():
        if not _is_linear(layer):
            yield from _experts_targets(name, layer, config, excluded)
            continue
        if not should_convert_module(name, excluded):
            yield QuantTarget(name, layer, None)
            continue
        scheme = config.head_scheme() if layer is head else config.layer_scheme()
        weight = f"{name}.weight"
        reason = ""
        if scheme is not None:
            reason = scheme.why_unsupported(*sizes_of(layer))
            if weight in sources or (weight in tied and layer is not head):
                reason = "its weight is another module's, too"
            elif weight in tied:
                reason = _why_tied_for_good(model, weight)
            if name in read_directly:
                reason = "the model's code reads its weight, beside calling it"
            reason = next((why for end, why in kept.items() if weight.endswith(end)), reason)
            if places[id(layer)] > 1:
                reason = "it stands in several places of the model"
        yield QuantTarget(name, layer, None if reason else scheme, reason, tied.get(weight, ""))


def _kept_by_conversions(model: torch.nn.Module) -> dict[str, str]:
    """Why weights stay for what transformers makes of their tensors in a checkpoint, by the end of a name.

    Inkling2's head is cut to what its parameter says; another of its weights has a name there to which no
    `scales` can be added.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # before transformers 5
        return {}
    reasons = {}
    for conversion in get_model_conversion_mapping(model):
        asks = any(splits.asks_for_parameter(each) for each in getattr(conversion, "operations", ()))
        is_bare = not any(source.endswith("weight") for source in conversion.source_patterns)
        for pattern in conversion.target_patterns:
            name = _BACK_REFERENCE.sub("", pattern)
            if asks:
                reasons[name] = "what converts its checkpoint asks the layer for a parameter"
            elif is_bare and name.endswith(".weight"):
                reasons[name] = "its checkpoint names it otherwise than as a weight"
    return reasons


def _named_targets(model: torch.nn.Module, schemes: dict[str, QuantScheme]) -> Iterator[QuantTarget]:
    modules = dict(model.named_modules())
    tied = getattr(model, "all_tied_weights_keys", {})
    for name, scheme in schemes.items():
        layer = modules.get(name)
        if not isinstance(layer, torch.nn.Linear):
            raise QuantizationError(
                f"quantization_config names the layer {name}, and {type(model).__name__} has no linear layer "
                "of that name: it was written for another model"
            )
        yield QuantTarget(name, layer, scheme, tied=tied.get(f"{name}.weight", ""))


def _experts_targets(
    name: str, module: torch.nn.Module, config: LiteBoostConfig, excluded: list[str]
) -> Iterator[QuantTarget]:
    from transformers.quantizers.quantizers_utils import should_convert_module

    known = weights_of(module)
    for local, parameter in module.named_parameters(recurse=False):
        full = f"{name}.{local}"
        if local not in known or parameter.dim() != 3:
            if parameter.dim() == 3 and "expert" in type(module).__qualname__.lower():
                yield QuantTarget(full, module, None, "experts of a form that is not read as integers")
            continue
        shape = WeightShape.of(parameter, known[local])
        scheme = config.experts_scheme()
        reason = shape.why_unsupported(scheme) if scheme is not None else ""
        if not (should_convert_module(name, excluded) and should_convert_module(full, excluded)):
            scheme, reason = None, ""
        yield QuantTarget(full, module, None if reason else scheme, reason, experts=shape)


def _is_linear(layer: torch.nn.Module) -> bool:
    """Whether it computes what ``nn.Linear`` does: that, ``Conv1D``, or a class that says it otherwise."""
    cls = class_as_written(layer)
    # A bound layer is of a subclass of the same name, see engine.swap.
    is_plain = isinstance(layer, torch.nn.Linear) and cls.__qualname__ == torch.nn.Linear.__qualname__
    return is_plain or isinstance(layer, Conv1D) or is_product(cls)


def report_targets(targets: list[QuantTarget]) -> None:
    """What the status says of a model's layers."""
    for target in targets:
        if target.scheme is not None:
            report.add(Outcome(RULE, APPLIED, target.scheme.name))
        elif target.reason:
            report.add(Outcome(RULE, REFUSED, target.name, f"stays as it is: {target.reason}"))


def untie(model: torch.nn.Module, target: QuantTarget) -> None:
    """Let a head that is quantized have a weight of its own, if another module has it, too."""
    if not target.tied:
        return
    getattr(model, "all_tied_weights_keys", {}).pop(f"{target.name}.weight", None)
    for config in (model.config, model.config.get_text_config()):
        if getattr(config, _TIE, False):
            setattr(config, _TIE, False)


def _why_tied_for_good(model: torch.nn.Module, weight: str) -> str:
    """Why a head that is tied by its ``weight`` cannot have one of its own, or an empty string.

    A checkpoint says so by one setting, which must then mean nothing else.
    """
    if set(getattr(model, "all_tied_weights_keys", {})) != {weight}:
        return "it is tied, and the setting that says so ties other parameters, too"
    if any(_computes_by_tie(type(module)) for module in model.modules()):
        return "it is tied, and the model computes something else where it is not"
    return ""


@functools.cache
def _computes_by_tie(cls: type) -> bool:
    """Whether a method of a class that is called with inputs reads the setting that ties a head."""
    return any(
        isinstance(node, ast.Attribute) and node.attr == _TIE and isinstance(node.ctx, ast.Load)
        for name, method in methods(cls).items()
        if not name.startswith((*_ELSEWHERE, "set_"))
        for node in ast.walk(method)
    )


def _layers_read_directly(model: torch.nn.Module) -> set[str]:
    """Names of the layers of ``model`` whose ``weight`` its code reads beside calling them.

    Integers would be misread there. As in ``self.lm_head(x.to(self.lm_head.weight.dtype))`` (Mamba), or
    ``self.dt_proj.weight @ time_step``.
    """
    modules = dict(model.named_modules())
    found: set[str] = set()
    for name, module in modules.items():
        for root, path in _weight_reads(type(module)):
            if root == "self":
                found.add(f"{name}.{path}" if name else path)
            else:  # a block of a loop, say: whatever has such a child
                found |= {each for each in modules if f".{each}".endswith(f".{path}")}
    return found & set(modules)


@functools.cache
def _weight_reads(cls: type) -> frozenset[tuple[str, str]]:
    """(variable, path of a child) of each ``variable.path.weight`` in the methods of a class."""
    found = set()
    for name, method in methods(cls).items():
        if name.startswith(_ELSEWHERE) or _CUDA in name:
            continue
        for node in ast.walk(method):
            if isinstance(node, ast.Attribute) and node.attr == "weight":
                root, _, path = ast.unparse(node.value).partition(".")
                if path and _DOTTED.fullmatch(f"{root}.{path}"):
                    found.add((root, path))
    return frozenset(found)
