"""Where `from_pretrained` reads the files of a quantised model: tensor by tensor, none of them mapped.

transformers is handed objects that read, or make, a tensor when they are asked for it. So a weight is in
memory as it was stored only while it is converted, and a file that is cut short or changed is found out.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Mapping
from typing import Any

import torch

from ..checkpoint.files import File, Slice
from .digests import DIGESTS
from .quantizer import LiteBoostQuantizer

_MODELING = "transformers.modeling_utils"
_ARGUMENTS = ["model", "state_dict", "checkpoint_files", "load_config", "expected_keys"]


def install(hooks: Any) -> None:
    """Read the files of models that are quantised by us, whoever asks for them."""
    load = getattr(sys.modules[_MODELING].PreTrainedModel, "_load_pretrained_model", None)
    if load is not None and list(inspect.signature(load).parameters) == _ARGUMENTS:
        hooks.set_attribute(_MODELING, "PreTrainedModel._load_pretrained_model", _reading)


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
        quantizer = load_config.hf_quantizer
        is_ours = isinstance(quantizer, LiteBoostQuantizer) and state_dict is None
        if is_ours and is_safetensors(checkpoint_files):
            state_dict = quantizer.tensors(tensors_of(checkpoint_files))
        return load(model, state_dict, checkpoint_files, load_config, expected_keys)

    return staticmethod(_load_pretrained_model)


def is_safetensors(files: Any) -> bool:
    """Whether these are files that `tensors_of` reads."""
    return bool(files) and all(str(file).endswith(".safetensors") for file in files)


def tensors_of(files: list[str]) -> dict[str, Slice]:
    """All tensors of ``files``, unread; those we wrote are compared with their checksums when they are.

    Raises:
        CheckpointError: A file is no safetensors file, or is cut short.
    """
    found = {}
    for path in files:
        file = File(path)
        digests: Mapping[str, str] = json.loads(file.metadata.get(DIGESTS, "{}"))
        found.update((name, Slice(file, name, digest=digests.get(name, ""))) for name in file.entries)
    return found
