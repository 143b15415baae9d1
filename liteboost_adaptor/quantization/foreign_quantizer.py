"""The quantizer for checkpoints of other libraries (`formats`), on our kernels.

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

from .. import native
from ..checkpoint.files import LazyTensor, Slice
from ..errors import QuantizationError
from ..report import APPLIED, REFUSED, Outcome, report
from .checkpoint.checksums import is_safetensors, tensors_of
from .checkpoint.parameter_names import ParameterNames
from .config import LiteBoostConfig
from .formats import FORMATS, reader_of
from .formats.base import CheckpointFormat, CheckpointLayer
from .formats.compressed_tensors import CompressedTensorsFormat
from .formats.repack import RepackedLayer
from .hf_quantizer import LiteBoostQuantizer
from .identifiers import CHECKPOINTS, RULE

METHODS = tuple(each.method for each in FORMATS)
#: By the identity of a configuration, what ``config.json`` has: their classes drop what they do not know.
_config_values: dict[int, Mapping[str, Any]] = {}


class RawConfig(QuantizationConfigMixin):
    """A ``quantization_config`` as a checkpoint has it, for a method whose own class needs its package."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.quant_method = values["quant_method"]
        self.values = dict(values)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.values)


def quantizer_factory(original: Callable[..., Any]) -> Callable[..., Any]:
    """What makes the quantizer of a method: ours for what we read, else ``original``."""

    @functools.wraps(original, updated=())
    def make(config: Any, **kwargs: Any) -> Any:
        values = _config_values.get(id(config)) or config.to_dict()
        reader, reason = reader_of(values)
        reason = _why_not_ours() or reason
        if reader is None or reason or not kwargs.get("pre_quantized", True):
            if reason:
                report.add(Outcome(CHECKPOINTS, REFUSED, str(values.get("quant_method")), reason))
            return original(config, **kwargs)
        return ForeignQuantizer(config, reader)

    return make


def _why_not_ours() -> str:
    """Why checkpoints of other libraries are theirs to read on this machine, or an empty string."""
    if torch.cuda.is_available():
        return "there is a GPU"
    return "" if native.load().loaded else "the compiled kernels are missing"


class ConfigFactory:
    """What stands for the configuration class ``original`` of a method in transformers' registry."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def from_dict(self, values: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """A configuration from that of a checkpoint."""
        if _why_not_ours() or reader_of(values)[0] is None:
            return self._original.from_dict(values, *args, **kwargs)
        if values.get("quant_method") == CompressedTensorsFormat.method:
            return RawConfig(values)
        # Asks for a package, and says how a model was quantized, not how its weights are packed.
        known = {name: value for name, value in values.items() if name != "modules_in_block_to_quantize"}
        try:
            config = self._original.from_dict(known, *args, **kwargs)
        except (TypeError, ValueError, AttributeError, KeyError) as fault:
            raise QuantizationError(
                f"quantization_config in config.json is none of the method {values['quant_method']}: {fault}"
                ". Correct it, or copy config.json again"
            ) from fault
        made = config[0] if isinstance(config, tuple) else config
        _config_values[id(made)] = dict(values)
        weakref.finalize(made, _config_values.pop, id(made), None)
        return config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class ForeignQuantizer(LiteBoostQuantizer):
    """Reads a checkpoint of another format; the model is one of ours afterwards, and is saved as such."""

    has_checksums = False

    def __init__(self, quantization_config: QuantizationConfigMixin, reader: CheckpointFormat) -> None:
        super().__init__(quantization_config, pre_quantized=True)
        self._reader = reader
        self._method = str(
            getattr(quantization_config.quant_method, "value", quantization_config.quant_method)
        )
        #: By their names in the checkpoint: repacked, or to be dequantized where the model has no such layer.
        self._layers: dict[str, RepackedLayer | CheckpointLayer] = {}

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
            schemes = self._find_layers(model, tensors)
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
        self._layers = {}  # which keep files open
        return super()._process_model_after_weight_loading(model, **kwargs)

    def _find_layers(self, model: torch.nn.Module, tensors: Mapping[str, Slice]) -> dict[str, dict[str, Any]]:
        """Note the layers of the checkpoint; the schemes of those that the model has."""
        from transformers.conversion_mapping import get_model_conversion_mapping

        schemes = {}
        names = ParameterNames(model, get_model_conversion_mapping(model))
        modules = dict(model.named_modules())
        for name in self._reader.layer_names(tensors):
            target, pattern = names.target_of(f"{name}.weight")
            target = target.removesuffix(".weight")
            linear = modules.get(target)
            if pattern is None and isinstance(linear, torch.nn.Linear):
                layer = self._reader.layer(name, target, tensors, (linear.out_features, linear.in_features))
                self._layers[name] = repacked = RepackedLayer.of(layer)
                schemes[target] = repacked.scheme.to_dict()
            else:
                self._layers[name] = self._reader.layer(name, "", tensors, None)
                reason = "dequantized: it is part of a tensor that no linear layer has"
                report.add(Outcome(RULE, REFUSED, name, reason))
        return schemes

    def tensors(self, tensors: Mapping[str, Slice]) -> dict[str, Slice | LazyTensor]:
        found: dict[str, Slice | LazyTensor] = {}
        for name, tensor in tensors.items():
            owner, _, suffix = name.rpartition(".")
            # Scales of activations and of a cache can be of layers that are not quantized themselves.
            if suffix not in self._reader.suffixes and not (owner in self._layers and suffix == "weight"):
                found[name] = tensor
        for name, layer in self._layers.items():
            if isinstance(layer, CheckpointLayer):
                found[f"{name}.weight"] = LazyTensor(layer.shape, torch.float32, layer.dequantize)
                continue
            for buffer, (shape, dtype) in layer.scheme.buffer_specs(*layer.layer.shape).items():
                found[f"{name}.{buffer}"] = LazyTensor(shape, dtype, getattr(layer, buffer))
        return found
