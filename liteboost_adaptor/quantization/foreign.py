"""Checkpoints that others have quantised (see `formats`), on our kernels.

For them the quantizers of transformers ask for a GPU, or packages that need one. Ours stands in their place
in transformers' registry, reads what it knows to read, and hands the rest to them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checkpoint.files import Made, Slice
from ..errors import QuantizationError
from ..report import APPLIED, REFUSED, Outcome, report
from . import formats
from .config import LiteBoostConfig
from .formats import Format
from .names import RULE
from .naming import owners
from .quantizer import LiteBoostQuantizer
from .reading import is_safetensors, tensors_of
from .stored import Form
from .stored_layer import StoredLayer

METHODS = ("gptq", "awq", "compressed-tensors")
#: The rule that turns it off.
CHECKPOINTS = "quantization.checkpoints"


class StoredConfig(QuantizationConfigMixin):
    """A ``quantization_config`` as a checkpoint has it, for a method whose own class needs its package."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.quant_method = values["quant_method"]
        self.values = dict(values)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.values)


def quantizer(original: Callable[..., Any]) -> Callable[..., Any]:
    """What makes the quantizer of a method: ours for what we read, else ``original``."""

    @functools.wraps(original, updated=())
    def made(config: Any, **kwargs: Any) -> Any:
        values = _values_of(config)
        found, reason = formats.of(values)
        if torch.cuda.is_available():
            reason = "there is a GPU"
        if found is None or reason or not kwargs.get("pre_quantized", True):
            if reason:
                report.add(Outcome(CHECKPOINTS, REFUSED, str(values.get("quant_method")), reason))
            return original(config, **kwargs)
        return ForeignQuantizer(config, found)

    return made


class _Configs:
    """What makes the configuration of a method from a dictionary."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def from_dict(self, values: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if torch.cuda.is_available() or formats.of(values)[0] is None:
            return self._original.from_dict(values, *args, **kwargs)
        if values.get("quant_method") == "compressed-tensors":
            return StoredConfig(values)
        # Asks for a package, and says how a model was quantised, not how it is kept.
        kept = {name: value for name, value in values.items() if name != "modules_in_block_to_quantize"}
        try:
            made = self._original.from_dict(kept, *args, **kwargs)
        except (TypeError, ValueError, AttributeError, KeyError) as fault:
            raise QuantizationError(
                f"quantization_config in config.json is none of the method {values['quant_method']}: {fault}"
                ". Correct it, or copy config.json again"
            ) from fault
        _note_values(made[0] if isinstance(made, tuple) else made, values)
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


#: By the identity of a configuration, what ``config.json`` said: their classes drop what they do not know.
_said: dict[int, Mapping[str, Any]] = {}


def _note_values(config: Any, values: Mapping[str, Any]) -> None:
    _said[id(config)] = dict(values)
    weakref.finalize(config, _said.pop, id(config), None)


def _values_of(config: Any) -> Mapping[str, Any]:
    return _said.get(id(config)) or config.to_dict()


def configs(original: Any) -> Any:
    """What stands for the configuration class ``original`` in transformers' registry."""
    return _Configs(original)


class ForeignQuantizer(LiteBoostQuantizer):
    """Reads a checkpoint of another format; the model is one of ours afterwards, and is saved as such."""

    has_checksums = False

    def __init__(self, quantization_config: QuantizationConfigMixin, kind: Format) -> None:
        super().__init__(quantization_config, pre_quantized=True)
        self._format = kind
        self._method = str(
            getattr(quantization_config.quant_method, "value", quantization_config.quant_method)
        )
        self._forms: dict[str, Form] = {}
        self._layers: dict[str, StoredLayer] = {}

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        placed = set(device_map.values()) if isinstance(device_map, dict) else {device_map}
        if "disk" in placed:
            raise QuantizationError(
                f"a checkpoint of {self._method} is not converted on its way to the disk: load it without "
                "that, save_pretrained it, and load what is saved with this device_map"
            )

    def _process_model_before_weight_loading(
        self, model: torch.nn.Module, checkpoint_files: Any = None, **kwargs: Any
    ) -> torch.nn.Module:
        if not is_safetensors(checkpoint_files):
            raise QuantizationError(
                f"a checkpoint of {self._method} is read from safetensors, found {checkpoint_files}; "
                "convert it"
            )
        tensors = tensors_of(checkpoint_files)
        with torch.device("cpu"):  # the model is being made on the meta device
            schemes = self._find(model, tensors)
        if not self._layers:
            raise QuantizationError(
                f"quantization_config in config.json says quant_method = {self._method!r}, and no tensor in "
                f"{', '.join(map(str, checkpoint_files[:3]))} is of that format; copy config.json again"
            )
        self.quantization_config = LiteBoostConfig(head=16, layers=schemes)
        model.quantization_method = self.quantization_config.quant_method
        report.add(Outcome(CHECKPOINTS, APPLIED, self._method))
        return super()._process_model_before_weight_loading(model)

    def _process_model_after_weight_loading(self, model: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        self._layers, self._forms = {}, {}  # which keep files open
        return super()._process_model_after_weight_loading(model, **kwargs)

    def _find(self, model: torch.nn.Module, tensors: Mapping[str, Slice]) -> dict[str, dict[str, Any]]:
        """Note the layers of the checkpoint; the schemes of those that the model has."""
        from transformers.conversion_mapping import get_model_conversion_mapping

        schemes = {}
        names = self._format.names(tensors)
        for name, target in owners(model, names, get_model_conversion_mapping(model)).items():
            layer = self._format.layer(name, target, tensors, _shape_of(model, target))
            self._layers[name] = layer
            if target:
                self._forms[name] = _form(layer)
                schemes[target] = self._forms[name].scheme.to_dict()
            else:
                reason = "multiplied out: it is part of a tensor that no linear layer has"
                report.add(Outcome(RULE, REFUSED, name, reason))
        return schemes

    def tensors(self, tensors: Mapping[str, Slice]) -> dict[str, Slice | Made]:
        found: dict[str, Slice | Made] = {}
        for name, tensor in tensors.items():
            owner, _, part = name.rpartition(".")
            # Scales of activations and of a cache can be of layers that are not quantised themselves.
            is_foreign = owner in self._layers and (part in self._format.parts or part == "weight")
            if not is_foreign and part not in self._format.parts:
                found[name] = tensor
        for name, layer in self._layers.items():
            if name in self._forms:
                found |= _parts(name, layer, self._forms[name])
            else:
                found[f"{name}.weight"] = Made(layer.shape, torch.float32, layer.dequantized)
        return found


def _shape_of(model: torch.nn.Module, target: str) -> tuple[int, int] | None:
    """Of the weight of a linear layer; None where the model has no counterpart."""
    if not target:
        return None
    layer = model.get_submodule(target)
    return layer.out_features, layer.in_features


def _form(layer: StoredLayer) -> Form:
    zeros = layer.zeros()
    return Form.of(layer.bits, layer.groups(), layer.group_count, zeros is not None, layer.scale_dtype)


def _parts(name: str, layer: StoredLayer, form: Form) -> dict[str, Made]:
    """The buffers of a `QuantizedLinear`."""
    make = {
        "weight": lambda: form.weight(layer.integers(), layer.zeros(), layer.bits),
        "scales": lambda: _scales(layer, form),
        "zero_points": lambda: form.zero_points(layer.zeros(), layer.shape[0], layer.bits),
        "columns": lambda: form.columns(layer.shape[1]),
    }
    return {
        f"{name}.{part}": Made(shape, dtype, make[part])
        for part, (shape, dtype) in form.scheme.shapes(*layer.shape).items()
    }


def _scales(layer: StoredLayer, form: Form) -> torch.Tensor:
    try:
        return form.scales(layer.scales())
    except OverflowError as fault:
        raise layer.fault(f"{layer.scales_suffix} {fault}", layer.scales_suffix) from fault
