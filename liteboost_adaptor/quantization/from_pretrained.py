"""Where `from_pretrained` reads the files of a quantized model: tensor by tensor, none of them mapped.

transformers is handed objects that read, or make, a tensor when they are asked for it. So a weight is in
memory as its file has it only while it is converted, and a file that is cut short or changed is found out.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any

import torch

from .checkpoint import verify
from .checkpoint.checksums import is_safetensors, tensors_of, why_unverified
from .hf_quantizer import LiteBoostQuantizer

if TYPE_CHECKING:
    from ..engine.undo_stack import UndoStack

_MODELING = "transformers.modeling_utils"
_ARGUMENTS = ["model", "state_dict", "checkpoint_files", "load_config", "expected_keys"]


def install(stack: UndoStack) -> None:
    """Read the files of models that are quantized by us, whoever asks for them."""
    load = getattr(sys.modules[_MODELING].PreTrainedModel, "_load_pretrained_model", None)
    if load is not None and list(inspect.signature(load).parameters) == _ARGUMENTS:
        stack.set_attribute(_MODELING, "PreTrainedModel._load_pretrained_model", _reading)


def _reading(original: Any) -> Any:
    load = getattr(original, "__func__", original)

    @functools.wraps(load)
    def _load_pretrained_model(
        model: torch.nn.Module,
        state_dict: Any,
        checkpoint_files: Any,
        load_config: Any,
        expected_keys: Any = None,
    ) -> Any:
        arguments = checkpoint_files, load_config, expected_keys
        quantizer = load_config.hf_quantizer
        is_read = state_dict is None and is_safetensors(checkpoint_files)
        if not is_read or not (quantizer is None or isinstance(quantizer, LiteBoostQuantizer)):
            return load(model, state_dict, *arguments)
        if quantizer is None:
            result = load(model, state_dict, *arguments)
            verify.check_unread(model, result[0], checkpoint_files)
            return result
        tensors = quantizer.tensors(tensors_of(checkpoint_files))
        quantizer.files = [str(file) for file in checkpoint_files]
        if not quantizer.pre_quantized:
            result = load(model, tensors, *arguments)
            if quantizer.faults:
                raise quantizer.faults[0]
            return result
        verify.check_integers(model, tensors, load_config.weight_mapping)
        result = load(model, tensors, *arguments)
        verify.check_names(model, result[0], checkpoint_files)
        config = quantizer.quantization_config
        if quantizer.has_checksums and config.checksums and config.scheme is not None:  # it has integers
            quantizer.unverified = why_unverified(checkpoint_files, config.to_dict())
        return result

    return staticmethod(_load_pretrained_model)
