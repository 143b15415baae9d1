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

from .. import memory, native
from ..checkpoint.files import Slice
from ..errors import CheckpointError, QuantizationError
from .checkpoint import checksums, splits
from .checkpoint.parameter_names import conversions_of_quantized
from .checkpoint.verify import check_layers
from .config import LiteBoostConfig
from .layers import QuantizedExperts, QuantizedLayer, QuantizedLinear, ShardedWeight
from .layers.target import QuantTarget
from .model import convert, prepack
from .schemes import quantize
from .selection import report_targets, targets_of, untie


class LiteBoostQuantizer(HfQuantizer):
    """Puts quantized layers in the place of others, and their weights into them as they are loaded."""

    requires_calibration = False
    #: Whether checkpoints that it reads are written with checksums.
    has_checksums = True
    quantization_config: LiteBoostConfig

    def __init__(self, quantization_config: LiteBoostConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._targets: list[QuantTarget] = []
        #: The head that is quantized from the parameter it was tied to, by that parameter's name.
        self.heads: dict[str, str] = {}
        #: Experts that are yet to be quantized while they are loaded, by the names of their parameters.
        self.pending_experts: dict[str, QuantTarget] = {}
        #: Weights that are quantized while they are loaded, with shards of other processes, by name.
        self.sharded_weights: dict[str, ShardedWeight] = {}
        #: Whether inputs of layers of 4 bits are rounded, which whoever wrote the checkpoint did not ask for.
        self.overrides_w4a16_by_w4a8 = False
        #: Where it reads, for errors.
        self.files: list[str] = []
        #: Of weights that could not be rounded: transformers catches these, and says less.
        self.faults: list[QuantizationError] = []
        #: Why nobody knows whether what was read is what was written, or an empty string.
        self.unverified = ""
        #: How transformers takes apart what holds experts, for when they are parameters again.
        self._conversions: Any = None

    @property
    def calibrates(self) -> bool:
        """Whether the whole model, in floating point, reads a text first."""
        return self.quantization_config.calibrate is not None and not self.pre_quantized

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        native.require("a quantized model")
        placed = set(device_map.values()) if isinstance(device_map, dict) else {device_map}
        if not self.pre_quantized and "disk" in placed:
            raise QuantizationError(
                "weights are not quantized on their way to the disk: quantize the checkpoint first "
                "(python -m liteboost_adaptor quantize), and load that with this device_map"
            )

    def _process_model_before_weight_loading(self, model: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        if self.calibrates:
            return model  # it reads the text in floating point
        self._targets = list(targets_of(model, self.quantization_config))
        for target in self._targets:
            if target.scheme is None:
                continue
            if target.experts is not None and not self.pre_quantized:
                self.pending_experts[target.name] = target  # the loader looks for the parameter
                continue
            target.replace(model)
            if target.tied:
                self.heads[target.tied] = f"{target.name}.weight"
            untie(model, target)
        return model

    def param_needs_quantization(self, model: torch.nn.Module, param_name: str, **kwargs: Any) -> bool:
        if param_name in self.heads or param_name in self.pending_experts:
            return True
        module, name = get_module_from_name(model, param_name)
        # Of a checkpoint that is quantized, all parts: what does not fit then comes to `check_layers`.
        return isinstance(module, QuantizedLayer) and (
            name == "weight" or (self.pre_quantized and name != "bias")
        )

    def tensors(self, tensors: Mapping[str, Slice]) -> Mapping[str, Any]:
        """What the loader is given for these ``tensors`` of the files: by name, read when it is indexed."""
        return tensors

    def update_weight_conversions(self, weight_conversions: Any, model: torch.nn.Module) -> list[Any]:
        """What tensors of a checkpoint become, which may be several layers of one tensor."""
        conversions = super().update_weight_conversions(weight_conversions, model)
        return splits.of_layers(conversions, None if self.pre_quantized else self.sizes_of)

    def sizes_of(self, name: str, layer: QuantizedLinear) -> tuple[int, int]:
        """Outputs and inputs of ``name``, the weight of ``layer``, as it is read: a shard, or whole."""
        sharded = self.sharded_weights.get(name)
        found = sharded.shape if sharded else layer
        return found.out_features, found.in_features

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self)

    def _process_model_after_weight_loading(self, model: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        if self.calibrates:
            self._targets = list(targets_of(model, self.quantization_config))
            convert(model, self.quantization_config, self._targets)
        else:
            self.check_loaded(model)
            prepack(model)
        if self.overrides_w4a16_by_w4a8:
            self._round_activations(model)
        self._keep_layers_apart(model)
        report_targets(self._targets)
        self._targets = []
        memory.give_back()  # what rounding and converting needed
        return model

    def _round_activations(self, model: torch.nn.Module) -> None:
        """Let layers of w4a16 be w4a8, which has the same tensors, and the configuration say so."""
        for layer in model.modules():
            if isinstance(layer, QuantizedLinear) and layer.scheme.name == "w4a16":
                layer.scheme = replace(layer.scheme, name="w4a8")
        config = self.quantization_config
        for values in (config.layers or {}).values():
            values["name"] = "w4a8" if values["name"] == "w4a16" else values["name"]
        config.scheme = "w4a8" if config.scheme == "w4a16" else config.scheme

    def check_loaded(self, model: torch.nn.Module) -> None:
        """Raise `QuantizationError` where ``model``, which was loaded, does not hold what was asked for."""
        if not self.calibrates:
            check_layers(model, self.pending_experts, ", ".join(self.files[:3]))
            if self.unverified:
                raise CheckpointError(self.unverified)

    def claim(self, model: torch.nn.Module) -> None:
        """Make this the quantizer of a model that was quantized after it was loaded."""
        self.pre_quantized = True
        model.hf_quantizer = self
        model.is_quantized = True
        model.quantization_method = self.quantization_config.quant_method
        model.config.quantization_config = self.quantization_config
        self._keep_layers_apart(model)

    def _keep_layers_apart(self, model: torch.nn.Module) -> None:
        """Have `save_pretrained` write quantized layers as they are: experts together, others each alone."""
        self._conversions = getattr(model, "_weight_conversions", None)
        if any(isinstance(module, QuantizedExperts | QuantizedLinear) for module in model.modules()):
            model._weight_conversions = conversions_of_quantized(model)

    def get_state_dict_and_metadata(self, model: torch.nn.Module) -> tuple[Any, dict[str, str]]:
        if getattr(model, "_hf_peft_config_loaded", False):
            return super().get_state_dict_and_metadata(model)  # the adapter is saved, and nothing of ours
        state = model.state_dict()
        for name in getattr(model, "_keys_to_ignore_on_save", None) or ():  # Marian's table of positions
            state.pop(name, None)
        config = getattr(model.config, "quantization_config", None) or self.quantization_config
        return state, checksums.metadata(checksums.of_model(model, state), config.to_dict())

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # with adapters: gradients pass through, the integers stay

    @property
    def is_compileable(self) -> bool:
        return True

    def _dequantize(self, model: torch.nn.Module, dtype: torch.dtype | str | None = None) -> torch.nn.Module:
        if isinstance(dtype, str):  # which `save_pretrained` leaves in the configuration
            dtype = getattr(torch, dtype.removeprefix("torch."))
        dtype = dtype or torch.float32
        for name, layer in list(model.named_modules()):
            if isinstance(layer, QuantizedLinear):
                model.set_submodule(name, layer.with_weight(layer.dequantize(dtype)))
            elif isinstance(layer, QuantizedExperts):
                owner, _, local = name.rpartition(".")
                module = model.get_submodule(owner)
                delattr(module, local)
                module.register_parameter(local, torch.nn.Parameter(layer.dequantized_parameter(dtype)))
        model._weight_conversions = self._conversions
        return model


class _Quantize(ConversionOps):
    """One weight as it was read, to the tensors of its layer."""

    def __init__(self, quantizer: LiteBoostQuantizer) -> None:
        self._quantizer = quantizer

    def convert(
        self, input_dict: dict[str, Any], *, model: torch.nn.Module, full_layer_name: str, **kwargs: Any
    ) -> dict[str, Tensor]:
        try:
            return self._converted(input_dict, model, full_layer_name, kwargs.get("missing_keys"))
        except QuantizationError as fault:
            self._quantizer.faults.append(fault)
            raise

    def _converted(
        self,
        input_dict: dict[str, Any],
        model: torch.nn.Module,
        full_layer_name: str,
        missing_keys: set[str] | None,
    ) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for given, value in input_dict.items():
            # A rename hands one tensor over, in a list; what converters give has its target's name already.
            name = full_layer_name if len(input_dict) == 1 else given
            weight = value[0] if isinstance(value, list) else value
            if name in self._quantizer.pending_experts:
                self._put_experts(model, self._quantizer.pending_experts.pop(name), weight)
                (missing_keys or set()).discard(name)
                continue
            module, attribute = get_module_from_name(model, name)
            if isinstance(module, QuantizedLinear) and attribute == "weight":
                tensors |= self._quantized(module, name, weight)
            else:
                tensors[name] = weight
            if name in self._quantizer.heads:
                head = self._quantizer.heads[name]
                tensors |= self._quantized(get_module_from_name(model, head)[0], head, weight)
        return tensors

    def _put_experts(self, model: torch.nn.Module, target: QuantTarget, weight: Tensor) -> None:
        assert target.experts is not None and target.scheme is not None
        sharded = self._quantizer.sharded_weights.get(target.name)
        shape, scheme = (sharded.shape, sharded.scheme) if sharded else (target.experts, target.scheme)
        _check_shape(target.name, weight, shape.shape)
        quantized = shape.quantize(weight, scheme, target.name)
        if sharded:
            target = replace(target, experts=sharded.shard_shape, scheme=sharded.shard_scheme)
            quantized = sharded.take_shard(quantized)
        for tensor in target.replace(model, quantized).buffers():
            tensor._is_hf_initialized = True

    def _quantized(self, layer: QuantizedLinear, name: str, weight: Tensor) -> dict[str, Tensor]:
        weight = weight.t().contiguous() if layer.is_transposed else weight
        sharded = self._quantizer.sharded_weights.get(name)
        _check_shape(name, weight, self._quantizer.sizes_of(name, layer))
        quantized = quantize(weight, sharded.scheme if sharded else layer.scheme, name)
        tensors = (sharded.take_shard(quantized) if sharded else quantized).tensors()
        return {name.removesuffix("weight") + buffer: tensor for buffer, tensor in tensors.items()}


def _check_shape(name: str, weight: Tensor, wanted: Sequence[int]) -> None:
    if tuple(weight.shape) != tuple(wanted):
        raise QuantizationError(
            f"{name} of the checkpoint has shape {list(weight.shape)}, and the model's layer {list(wanted)}"
        )
