"""The quantizer that transformers calls in ``from_pretrained`` and ``save_pretrained``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name

from .. import memory
from ..checkpoint.files import Slice
from ..errors import CheckpointError, QuantizationError
from . import digests, naming
from .choices import Choice, choices, note, untie
from .config import LiteBoostConfig
from .conversion import arrange, convert, put
from .experts import QuantizedExperts
from .layers import QuantizedLinear
from .loaded import check_layers
from .parts import Part
from .rounding import quantize
from .weights import QuantizedWeight


class LiteBoostQuantizer(HfQuantizer):
    """Puts quantised layers in the place of others, and their weights into them as they are loaded."""

    requires_calibration = False
    #: Whether checkpoints that it reads are written with checksums.
    has_checksums = True
    quantization_config: LiteBoostConfig

    def __init__(self, quantization_config: LiteBoostConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._choices: list[Choice] = []
        #: The head that is quantised from the parameter it was tied to, by that parameter's name.
        self.heads: dict[str, str] = {}
        #: Experts that are quantised while they are loaded, by the names of their parameters.
        self.awaited: dict[str, Choice] = {}
        #: Weights that are rounded while they are loaded and that other processes keep the rest of, by name.
        self.parts: dict[str, Part] = {}
        #: Where it reads, for errors.
        self.files: list[str] = []
        #: Why nobody knows whether what was read is what was written, or an empty string.
        self.unverified = ""
        #: How transformers takes apart what holds experts, for when they are parameters again.
        self._conversions: Any = None

    @property
    def calibrates(self) -> bool:
        """Whether the whole model, in floating point, reads a text first."""
        return self.quantization_config.calibrate is not None and not self.pre_quantized

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        placed = set(device_map.values()) if isinstance(device_map, dict) else {device_map}
        if not self.pre_quantized and "disk" in placed:
            raise QuantizationError(
                "weights are not quantised on their way to the disk: quantise the checkpoint first "
                "(python -m liteboost_adaptor quantize), and load that with this device_map"
            )

    def _process_model_before_weight_loading(self, model: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        if self.calibrates:
            return model  # it reads the text in floating point
        self._choices = list(choices(model, self.quantization_config))
        for choice in self._choices:
            if choice.scheme is None:
                continue
            if choice.experts is not None and not self.pre_quantized:
                self.awaited[choice.name] = choice  # the loader looks for the parameter
                continue
            put(model, choice)
            if choice.tied:
                self.heads[choice.tied] = f"{choice.name}.weight"
                untie(model, choice)
        return model

    def param_needs_quantization(self, model: torch.nn.Module, param_name: str, **kwargs: Any) -> bool:
        if param_name in self.heads or param_name in self.awaited:
            return True
        module, name = get_module_from_name(model, param_name)
        # Of a checkpoint that is quantised, all parts: what does not fit then comes to `check_layers`.
        return isinstance(module, QuantizedWeight) and (
            name == "weight" or (self.pre_quantized and name != "bias")
        )

    def tensors(self, tensors: Mapping[str, Slice]) -> Mapping[str, Any]:
        """What the loader is given for these ``tensors`` of the files: by name, read when it is indexed."""
        return tensors

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self)

    def _process_model_after_weight_loading(self, model: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        if self.calibrates:
            self._choices = list(choices(model, self.quantization_config))
            convert(model, self.quantization_config, self._choices)
        else:
            self.check_loaded(model)
            arrange(model)
        self._keep_experts_whole(model)
        note(model, self._choices)
        self._choices = []
        memory.give_back()  # what rounding and converting needed
        return model

    def check_loaded(self, model: torch.nn.Module) -> None:
        """Raise `QuantizationError` where ``model``, which was loaded, does not hold what was asked for."""
        if not self.calibrates:
            check_layers(model, self.awaited, ", ".join(self.files[:3]))
            if self.unverified:
                raise CheckpointError(self.unverified)

    def claim(self, model: torch.nn.Module) -> None:
        """Make this the quantizer of a model that was quantised after it was loaded."""
        self.pre_quantized = True
        model.hf_quantizer = self
        model.is_quantized = True
        model.quantization_method = self.quantization_config.quant_method
        model.config.quantization_config = self.quantization_config
        self._keep_experts_whole(model)

    def _keep_experts_whole(self, model: torch.nn.Module) -> None:
        """Have `save_pretrained` write experts as they are kept, not one by one as checkpoints have them."""
        self._conversions = getattr(model, "_weight_conversions", None)
        if any(isinstance(module, QuantizedExperts) for module in model.modules()):
            model._weight_conversions = naming.without_experts(model)

    def get_state_dict_and_metadata(self, model: torch.nn.Module) -> tuple[Any, dict[str, str]]:
        if getattr(model, "_hf_peft_config_loaded", False):
            return super().get_state_dict_and_metadata(model)  # the adapter is saved, and nothing of ours
        state = model.state_dict()
        config = getattr(model.config, "quantization_config", None) or self.quantization_config
        return state, digests.metadata(digests.of_model(model, state), config.to_dict())

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # with adapters: gradients pass through, the integers stay

    @property
    def is_compileable(self) -> bool:
        return True

    def _dequantize(self, model: torch.nn.Module, dtype: torch.dtype | None = None) -> torch.nn.Module:
        wanted = dtype or torch.float32
        for name, layer in list(model.named_modules()):
            if isinstance(layer, QuantizedLinear):
                model.set_submodule(name, layer.dequantized_kv(wanted))
            elif isinstance(layer, QuantizedExperts):
                owner, _, local = name.rpartition(".")
                delattr(model.get_submodule(owner), local)
                parameter = torch.nn.Parameter(layer.form.parameter(layer.dequantized(wanted)))
                model.get_submodule(owner).register_parameter(local, parameter)
        model._weight_conversions = self._conversions
        return model


class _Quantize(ConversionOps):
    """One weight as it was read, to the tensors of its layer."""

    def __init__(self, quantizer: LiteBoostQuantizer) -> None:
        self._quantizer = quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        *,
        model: torch.nn.Module,
        full_layer_name: str,
        missing_keys: set[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for given, value in input_dict.items():
            # A rename hands one tensor over, in a list; what converters give has its target's name already.
            name = full_layer_name if len(input_dict) == 1 else given
            weight = value[0] if isinstance(value, list) else value
            if name in self._quantizer.awaited:
                self._put_experts(model, self._quantizer.awaited.pop(name), weight)
                (missing_keys or set()).discard(name)
                continue
            module, attribute = get_module_from_name(model, name)
            if isinstance(module, QuantizedLinear) and attribute == "weight":
                found |= self._quantized(model, name, weight)
            else:
                found[name] = weight
            if name in self._quantizer.heads:
                found |= self._quantized(model, self._quantizer.heads[name], weight)
        return found

    def _put_experts(self, model: torch.nn.Module, choice: Choice, weight: Tensor) -> None:
        assert choice.experts is not None and choice.scheme is not None
        part = self._quantizer.parts.get(choice.name)
        form, scheme = (part.read, part.scheme) if part else (choice.experts, choice.scheme)
        _check_shape(choice.name, weight, form.shape)
        rounded = form.quantize(weight, scheme, choice.name)
        if part:
            choice = replace(choice, experts=part.kept, scheme=part.kept_scheme)
            rounded = part.cut(rounded)
        for tensor in put(model, choice, rounded).buffers():
            tensor._is_hf_initialized = True

    def _quantized(self, model: torch.nn.Module, name: str, weight: Tensor) -> dict[str, Tensor]:
        layer, _ = get_module_from_name(model, name)
        prefix = name.removesuffix("weight")
        weight = weight.t().contiguous() if layer.is_transposed else weight
        part = self._quantizer.parts.get(name)
        sizes = (part.read.outputs, part.read.inputs) if part else (layer.out_features, layer.in_features)
        _check_shape(name, weight, sizes)
        rounded = quantize(weight, part.scheme if part else layer.scheme, name)
        tensors = (part.cut(rounded) if part else rounded).tensors()
        return {prefix + each: tensor for each, tensor in tensors.items()}


def _check_shape(name: str, weight: Tensor, wanted: Sequence[int]) -> None:
    if tuple(weight.shape) != tuple(wanted):
        raise QuantizationError(
            f"{name} of the checkpoint has shape {list(weight.shape)}, and the model's layer {list(wanted)}"
        )
